"""`Scorer`: scoring in this process, without the server."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from gpuscore.engine.ticket import Progress
from gpuscore.offline.calls import (
    Call,
    classify_call,
    pairs_call,
    rerank_call,
    score_call,
    score_calls,
)
from gpuscore.offline.decisions import decide_call, system_one_call
from gpuscore.offline.loaded import LoadedScorer
from gpuscore.offline.many import AHEAD, in_order
from gpuscore.types.call_options import (
    FamilyOptions,
    Items,
    LabelIds,
    Labels,
    LabelSequences,
    Normalization,
    ScoreOptions,
    Text,
)
from gpuscore.types.item_errors import OnError
from gpuscore.types.questions import Decision, Question, TypedAnswer, TypedQuestion
from gpuscore.types.results import Classification, PairScores, Ranking, Scores

ValueT = TypeVar("ValueT")


class Scorer(LoadedScorer):
    """Scores items with one model. A context manager; `close` frees the model."""

    def score(
        self,
        query: Text,
        items: Items,
        *,
        labels: Labels = None,
        label_token_ids: LabelIds = None,
        label_sequences: LabelSequences = None,
        label_length_normalization: Normalization = "none",
        apply_softmax: bool = False,
        temperature: float = 1.0,
        item_first: bool = False,
        logprobs: bool = False,
        on_error: OnError = "fail",
        logits: bool = False,
        progress: Progress | None = None,
    ) -> Scores:
        """Score each `query + item` prompt for its labels, as POST /v1/score does.

        Args:
            query: text or token ids that all prompts share.
            items: texts if the query is a text, lists of token ids if it is one, from any iterable
                with an order; a single text is one item.
            labels: label texts, or names of a classification model's classes. Give these,
                `label_token_ids` or `label_sequences`.
            label_token_ids: token ids, or numbers of classes; one list for all items, or one list
                per item.
            label_sequences: labels as lists of token ids, for all items.
            label_length_normalization: "mean": the logarithm of a label's probability is divided by
                its number of tokens before it becomes a score.
            apply_softmax: normalise over the labels instead of the vocabulary or all classes.
            temperature: divides the logits; must be 1.0 without apply_softmax.
            item_first: prompts are item + query.
            logprobs: also return full-vocabulary log-probabilities and the label mass.
            on_error: "fail": an item that cannot be scored raises its error; "null": it gets a row
                of NaN and stands in `errors`, and the others are scored.
            logits: also return the labels' logits, the only meaningful output of a model with a
                single class. Labels of several tokens have none.
            progress: called from time to time with the number of items scored so far.

        Raises:
            GpuscoreError: as over HTTP, but without limits on the number of items or labels.
        """
        options = ScoreOptions(
            labels=labels,
            label_token_ids=label_token_ids,
            label_sequences=label_sequences,
            label_length_normalization=label_length_normalization,
            apply_softmax=apply_softmax,
            temperature=temperature,
            item_first=item_first,
            logprobs=logprobs,
            on_error=on_error,
            logits=logits,
        )
        return self._run(score_call(self._prompts, query, items, options), progress)

    def score_many(
        self,
        requests: Iterable[tuple[Text, Items]],
        *,
        labels: Labels = None,
        label_token_ids: LabelIds = None,
        label_sequences: LabelSequences = None,
        label_length_normalization: Normalization = "none",
        apply_softmax: bool = False,
        temperature: float = 1.0,
        item_first: bool = False,
        logprobs: bool = False,
        on_error: OnError = "fail",
        logits: bool = False,
    ) -> Iterator[Scores]:
        """Score many pairs of a query and its items, and yield their scores in the given order.

        Faster than a loop over `score`: several batches of requests are in the engine at a time, so
        it is never idle while texts are prepared. `requests` may be a generator of any length.

        Args:
            requests: queries and items, as in `score`.
            labels, label_token_ids, label_sequences, label_length_normalization, apply_softmax,
                temperature, item_first, logprobs, on_error, logits: as in `score`, for all
                requests.

        Raises:
            GpuscoreError: as `score`, once the scores of all earlier requests have come; no more
                come then.
        """
        options = ScoreOptions(
            labels=labels,
            label_token_ids=label_token_ids,
            label_sequences=label_sequences,
            label_length_normalization=label_length_normalization,
            apply_softmax=apply_softmax,
            temperature=temperature,
            item_first=item_first,
            logprobs=logprobs,
            on_error=on_error,
            logits=logits,
        )
        calls = score_calls(self._prompts, requests, options)
        return in_order(calls, self._engine.score, AHEAD * self._backend.limits.max_tokens)

    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        top_n: int | None = None,
        *,
        instruction: str | None = None,
        raw_scores: bool = False,
        max_tokens_per_doc: int | None = None,
        truncate: bool = False,
        on_error: OnError = "fail",
    ) -> Ranking:
        """Order documents by relevance, in the prompt of the model's family, as POST /rerank does.

        Args:
            query: the query.
            documents: at least one text.
            top_n: number of best documents to return; None: all.
            instruction: replaces the family's own.
            raw_scores: return raw scores instead of relevances from 0 to 1.
            max_tokens_per_doc: cut longer documents at their end.
            truncate: cut documents where their prompts would not fit the model.
            on_error: "fail": a document that cannot be scored raises its error; "null": it is left
                out of the ranking and stands in `errors`, and the others are ranked.

        Raises:
            InvalidRequest: the model belongs to no known family of rerankers.
            GpuscoreError: as over HTTP.
        """
        options = FamilyOptions(instruction, raw_scores, max_tokens_per_doc, truncate, on_error)
        return self._run(rerank_call(self._prompts, query, documents, top_n, options))

    def score_pairs(
        self,
        pairs: Iterable[tuple[str, str]],
        *,
        instruction: str | None = None,
        raw_scores: bool = False,
        max_tokens_per_doc: int | None = None,
        truncate: bool = False,
        on_error: OnError = "fail",
    ) -> PairScores:
        """Score pairs of a query and a document, in the prompt of the model's family.

        Args:
            pairs: queries and documents.
            instruction, raw_scores, max_tokens_per_doc, truncate: as in `rerank`.
            on_error: as in `score`.

        Raises:
            GpuscoreError: as `rerank`.
        """
        options = FamilyOptions(instruction, raw_scores, max_tokens_per_doc, truncate, on_error)
        return self._run(pairs_call(self._prompts, pairs, options))

    def classify(
        self,
        texts: str | Iterable[str],
        *,
        query: str | None = None,
        labels: Labels = None,
        max_tokens_per_doc: int | None = None,
        truncate: bool = False,
    ) -> Classification:
        """Return the probability of each class, as POST /v1/classify does.

        Args:
            texts: for a guard, texts to judge in its own prompt; for other models, whole prompts.
            query: for guards: the user's message that each text answers.
            labels: the classes to choose from, if not all of the model's: names of classes, or
                texts of one token each.
            max_tokens_per_doc: for guards: cut longer texts at their end.
            truncate: for guards: cut texts where their prompts would not fit the model.

        Raises:
            MissingLabels: neither the model nor the call names classes.
            GpuscoreError: as over HTTP.
        """
        return self._run(
            classify_call(self._prompts, texts, query, labels, max_tokens_per_doc, truncate)
        )

    def decide(self, text: str, questions: Iterable[Question]) -> list[Decision]:
        """Answer typed questions about one text, as POST /v1/decisions does.

        Args:
            text: the text or conversation.
            questions: `Predicate`, `Choice` or `Rating`, of `gpuscore`.

        Raises:
            InvalidRequest: the model cannot answer such questions, or a question has a wrong
                number of answers.
        """
        return self._run(decide_call(self._prompts, text, questions))

    def system_one(
        self,
        state: Any,
        questions: Mapping[str, TypedQuestion],
        *,
        instructions: str | None = None,
    ) -> dict[str, TypedAnswer]:
        """Answer System One's typed questions about one state, as POST /v1/systemone does.

        Args:
            state: text, or any value that JSON has.
            questions: `Noul`, `Choice` or `Rating`, of `gpuscore`, by names of your choice.
            instructions: for the model, before the state.

        Raises:
            InvalidRequest: the model cannot answer such questions, or a question has a wrong
                number of answers.
        """
        return self._run(system_one_call(self._prompts, state, questions, instructions))

    def _run(self, call: Call[ValueT], progress: Progress | None = None) -> ValueT:
        if call.request is None:
            return call.finish(None)
        return call.finish(self._engine.score(call.request, progress).result())
