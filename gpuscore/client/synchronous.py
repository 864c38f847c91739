"""The blocking client."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpuscore.client.options import RequestOptions
from gpuscore.client.results import (
    ClassifyResponse,
    CompletionsResponse,
    PairsResponse,
    RerankResponse,
    ScoreResponse,
)
from gpuscore.client.scores import pairs_call, rerank_call, score_call
from gpuscore.client.sending import Sender
from gpuscore.client.system_one import system_one_call
from gpuscore.client.texts import classify_call, completions_call, decide_call
from gpuscore.types.call_options import (
    FamilyOptions,
    Ids,
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
from gpuscore.types.results import Document


class Client(Sender):
    """A client of one gpuscore server. It is a context manager; threads may share it.

    429, 502, 503 and connection errors are retried, up to `max_attempts` attempts in all, not
    before the server's Retry-After and not after the call's `deadline`. Other errors are not
    retried. Lists that are too long for one request are split by number and by bytes, and their
    answers are joined to one result.

    Args:
        url: such as http://127.0.0.1:8000, with a path if the server has a prefix.
        api_key: sent as bearer token.
        http: the caller's own httpx.Client, for proxies or certificates; it is not closed.
        **options: see `ClientOptions`.

    Raises:
        ValueError: an option is out of range, or the URL is invalid.
    """

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
        model: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> ScoreResponse:
        """Return the labels' probabilities after each `query + item` prompt; see `Scorer.score`.

        Args:
            query: the text or token ids that all items share.
            items: texts if the query is a text, lists of token ids if it is one.
            labels, label_token_ids, label_sequences, label_length_normalization, apply_softmax,
                temperature, item_first, logprobs, on_error: as in `Scorer.score`.
            model, priority, cache_salt, request_id: see `RequestOptions`.

        Raises:
            ClientError: StatusError, ConnectionFailed or BadAnswer.
            InvalidRequest: an argument is neither text nor token ids; all methods raise it.
            ValueError: there are lists of labels, but not one for each item.
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
        )
        more = RequestOptions(model, priority, cache_salt, request_id)
        return self._do(score_call(self._settings.limits, query, items, options, more))

    def rerank(
        self,
        query: str,
        documents: Iterable[Document],
        top_n: int | None = None,
        *,
        instruction: str | None = None,
        raw_scores: bool = False,
        rank_fields: Sequence[str] | None = None,
        max_tokens_per_doc: int | None = None,
        truncate: bool = False,
        on_error: OnError = "fail",
        model: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> RerankResponse:
        """Rank documents by relevance to a query, best first; see `Scorer.rerank`.

        Args:
            query: the text to rank by.
            documents: texts, or mappings with `text` or with `rank_fields`.
            top_n: number of best documents, of the whole list even if it is split; None: all.
            rank_fields: the fields to rank by, for documents that are mappings.
            instruction, raw_scores, max_tokens_per_doc, truncate, on_error: as in `Scorer.rerank`.
            model, priority, cache_salt, request_id: see `RequestOptions`.

        Raises:
            ClientError: StatusError, ConnectionFailed or BadAnswer.
        """
        options = FamilyOptions(instruction, raw_scores, max_tokens_per_doc, truncate, on_error)
        more = RequestOptions(model, priority, cache_salt, request_id)
        limits = self._settings.limits
        return self._do(rerank_call(limits, query, documents, top_n, rank_fields, options, more))

    def score_pairs(
        self,
        pairs: Iterable[tuple[str, str]],
        *,
        instruction: str | None = None,
        raw_scores: bool = False,
        max_tokens_per_doc: int | None = None,
        truncate: bool = False,
        on_error: OnError = "fail",
        model: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> PairsResponse:
        """Score pairs of a query and a document; see `Scorer.score_pairs`.

        Args:
            pairs: queries and documents.
            instruction, raw_scores, max_tokens_per_doc, truncate, on_error: as in
                `Scorer.score_pairs`.
            model, priority, cache_salt, request_id: see `RequestOptions`.

        Raises:
            ClientError: StatusError, ConnectionFailed or BadAnswer.
        """
        options = FamilyOptions(instruction, raw_scores, max_tokens_per_doc, truncate, on_error)
        more = RequestOptions(model, priority, cache_salt, request_id)
        return self._do(pairs_call(self._settings.limits, pairs, options, more))

    def classify(
        self,
        texts: str | Iterable[str],
        *,
        query: str | None = None,
        labels: Labels = None,
        max_tokens_per_doc: int | None = None,
        truncate: bool = False,
        model: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> ClassifyResponse:
        """Return the probability of each class; see `Scorer.classify`.

        Args:
            texts: texts to judge, or whole prompts.
            query, labels, max_tokens_per_doc, truncate: as in `Scorer.classify`.
            model, priority, cache_salt, request_id: see `RequestOptions`.

        Raises:
            ClientError: StatusError, ConnectionFailed or BadAnswer.
        """
        more = RequestOptions(model, priority, cache_salt, request_id)
        limits = self._settings.limits
        return self._do(
            classify_call(limits, texts, query, labels, max_tokens_per_doc, truncate, more)
        )

    def decide(
        self,
        text: str,
        questions: Iterable[Question],
        *,
        model: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> list[Decision]:
        """Answer typed questions about one text; see `Scorer.decide`.

        Args:
            text: the text or conversation.
            questions: `Predicate`, `Choice` or `Rating`, of `gpuscore`.
            model, priority, cache_salt, request_id: see `RequestOptions`.

        Raises:
            ClientError: StatusError, ConnectionFailed or BadAnswer.
        """
        more = RequestOptions(model, priority, cache_salt, request_id)
        return self._do(decide_call(self._settings.limits, text, questions, more))

    def system_one(
        self,
        state: Any,
        questions: Mapping[str, TypedQuestion],
        *,
        instructions: str | None = None,
        model: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> dict[str, TypedAnswer]:
        """Answer System One's typed questions about one state; see `Scorer.system_one`.

        Args:
            state: text, or any value that JSON has.
            questions: `Noul`, `Choice` or `Rating`, of `gpuscore`, by names of your choice.
            instructions: for the model, before the state.
            model, priority, cache_salt, request_id: see `RequestOptions`.

        Raises:
            ClientError: StatusError, ConnectionFailed or BadAnswer.
        """
        more = RequestOptions(model, priority, cache_salt, request_id)
        limits = self._settings.limits
        return self._do(system_one_call(limits, state, questions, instructions, more))

    def completions(
        self,
        prompts: str | Ids | Iterable[str] | Iterable[Ids],
        *,
        max_tokens: int = 0,
        echo: bool = True,
        logprobs: int | None = 0,
        add_special_tokens: bool = True,
        model: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> CompletionsResponse:
        """Return the log-probabilities of prompts, as POST /v1/completions does; generates nothing.

        Args:
            prompts: texts or lists of token ids; a text or a list of ids is one prompt.
            max_tokens: 0, or 1 for the most probable next token, too.
            echo: return the prompt itself.
            logprobs: 0 for those of the returned tokens, 1 to 20 for as many of the most probable
                ones at each position, too; None for none.
            add_special_tokens: texts get the tokenizer's special tokens.
            model, priority, cache_salt, request_id: see `RequestOptions`.

        Raises:
            ClientError: StatusError, ConnectionFailed or BadAnswer.
        """
        call = completions_call(
            self._settings.limits,
            prompts,
            max_tokens=max_tokens,
            echo=echo,
            logprobs=logprobs,
            add_special_tokens=add_special_tokens,
            more=RequestOptions(model, priority, cache_salt, request_id),
        )
        return self._do(call)
