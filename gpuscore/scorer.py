"""`Scorer`: scoring in this process, without the server."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TypeVar

from gpuscore.engine.ticket import Progress
from gpuscore.offline.calls import (
    Call,
    CallOptions,
    Items,
    LabelIds,
    Labels,
    Text,
    classify_call,
    classify_input,
    decide_call,
    pairs_call,
    rerank_call,
    score_call,
)
from gpuscore.offline.loaded import LoadedScorer
from gpuscore.offline.results import Classification, PairScores, Ranking, Scores
from gpuscore.questions import Decision, Question
from gpuscore.request import ScoreResult

ValueT = TypeVar("ValueT")
# `score_many` keeps this many batches' tokens in the engine, so that it never waits for texts.
AHEAD = 8


class Scorer(LoadedScorer):
    """Scores items with one model. A context manager; `close` frees the model."""

    def score(
        self,
        query: Text,
        items: Items,
        *,
        labels: Labels = None,
        label_token_ids: LabelIds = None,
        apply_softmax: bool = False,
        temperature: float = 1.0,
        item_first: bool = False,
        logprobs: bool = False,
        logits: bool = False,
        progress: Progress | None = None,
    ) -> Scores:
        """Score each `query + item` prompt for its labels, as POST /v1/score does.

        Args:
            query: text or token ids that all prompts share.
            items: texts if the query is a text, lists of token ids if it is one; a single text is
                one item.
            labels: label texts of one token each, or names of a classification model's classes.
                Give either these or `label_token_ids`.
            label_token_ids: token ids, or numbers of classes; one list for all items, or one list
                per item.
            apply_softmax: normalise over the labels instead of the vocabulary or all classes.
            temperature: divides the logits; must be 1.0 without apply_softmax.
            item_first: prompts are item + query.
            logprobs: also return full-vocabulary log-probabilities and the label mass.
            logits: also return the labels' logits, the only meaningful output of a model with a
                single class.
            progress: called from time to time with the number of items scored so far.

        Raises:
            GpuscoreError: as over HTTP, but without limits on the number of items or labels.
        """
        options = CallOptions(
            labels, label_token_ids, apply_softmax, temperature, item_first, logprobs, logits
        )
        call = score_call(self._prompts, query, items, options)
        return call if isinstance(call, Scores) else self._run(call, progress)

    def score_many(
        self,
        requests: Iterable[tuple[Text, Items]],
        *,
        labels: Labels = None,
        label_token_ids: LabelIds = None,
        apply_softmax: bool = False,
        temperature: float = 1.0,
        item_first: bool = False,
        logprobs: bool = False,
        logits: bool = False,
    ) -> Iterator[Scores]:
        """Score many pairs of a query and its items, and yield their scores in the given order.

        Faster than a loop over `score`: several batches of requests are in the engine at a time, so
        it is never idle while texts are prepared. `requests` may be a generator of any length.

        Args:
            requests: queries and items, as in `score`.
            labels, label_token_ids, apply_softmax, temperature, item_first, logprobs, logits: as in
                `score`, for all requests.

        Raises:
            GpuscoreError: as `score`; once a request is at fault, no more scores come.
        """
        options = CallOptions(
            labels, label_token_ids, apply_softmax, temperature, item_first, logprobs, logits
        )
        calls = (score_call(self._prompts, query, items, options) for query, items in requests)
        most, ahead = AHEAD * self._backend.limits.max_tokens, 0
        waiting: deque[tuple[Call[Scores] | Scores, Future[ScoreResult] | None]] = deque()
        for call in calls:
            future = self._engine.score(call.request) if isinstance(call, Call) else None
            waiting.append((call, future))
            ahead += _tokens(call)
            while ahead > most and len(waiting) > 1:
                ahead -= _tokens(waiting[0][0])
                yield _finished(*waiting.popleft())
        while waiting:
            yield _finished(*waiting.popleft())

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        instruction: str | None = None,
        raw_scores: bool = False,
        max_tokens_per_doc: int | None = None,
        truncate: bool = False,
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

        Raises:
            InvalidRequest: the model belongs to no known family of rerankers.
            GpuscoreError: as over HTTP.
        """
        call = rerank_call(
            self._prompts,
            query,
            documents,
            top_n=top_n,
            instruction=instruction,
            raw_scores=raw_scores,
            max_tokens_per_doc=max_tokens_per_doc,
            truncate=truncate,
        )
        return self._run(call)

    def score_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        instruction: str | None = None,
        raw_scores: bool = False,
        max_tokens_per_doc: int | None = None,
        truncate: bool = False,
    ) -> PairScores:
        """Score pairs of a query and a document, in the prompt of the model's family.

        Args:
            pairs: queries and documents.
            instruction, raw_scores, max_tokens_per_doc, truncate: as in `rerank`.

        Raises:
            GpuscoreError: as `rerank`.
        """
        call = pairs_call(
            self._prompts,
            pairs,
            instruction=instruction,
            raw_scores=raw_scores,
            max_tokens_per_doc=max_tokens_per_doc,
            truncate=truncate,
        )
        return self._run(call)

    def classify(
        self,
        texts: str | Sequence[str],
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
            classify_call(
                self._prompts, classify_input(texts, query, labels, max_tokens_per_doc, truncate)
            )
        )

    def decide(self, text: str, questions: Sequence[Question]) -> list[Decision]:
        """Answer typed questions about one text, as POST /v1/decisions does.

        Args:
            text: the text or conversation.
            questions: `Predicate`, `Choice` or `Rating`, of `gpuscore`.

        Raises:
            InvalidRequest: the model cannot answer such questions, or a question has a wrong
                number of answers.
        """
        return self._run(decide_call(self._prompts, text, questions))

    def _run(self, call: Call[ValueT], progress: Progress | None = None) -> ValueT:
        return call.finish(self._engine.score(call.request, progress).result())

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _tokens(call: Call[Scores] | Scores) -> int:
    return call.request.num_tokens if isinstance(call, Call) else 0


def _finished(call: Call[Scores] | Scores, future: "Future[ScoreResult] | None") -> Scores:
    if isinstance(call, Scores) or future is None:
        return call  # type: ignore[return-value]  # a call without a future is its result
    return call.finish(future.result())
