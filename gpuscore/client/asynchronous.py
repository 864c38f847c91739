"""The client for asyncio."""

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
from gpuscore.client.sending import AsyncSender
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


class AsyncClient(AsyncSender):
    """`Client` for asyncio: same arguments (`http` is an httpx.AsyncClient), results and errors.

    Tasks may share it. Cancelling a call closes its requests, and the server drops their work.
    """

    async def score(
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
        """Score items; see `Client.score`."""
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
        return await self._do(score_call(self._settings.limits, query, items, options, more))

    async def rerank(
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
        """Rank documents; see `Client.rerank`."""
        options = FamilyOptions(instruction, raw_scores, max_tokens_per_doc, truncate, on_error)
        more = RequestOptions(model, priority, cache_salt, request_id)
        limits = self._settings.limits
        return await self._do(
            rerank_call(limits, query, documents, top_n, rank_fields, options, more)
        )

    async def score_pairs(
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
        """Score pairs; see `Client.score_pairs`."""
        options = FamilyOptions(instruction, raw_scores, max_tokens_per_doc, truncate, on_error)
        more = RequestOptions(model, priority, cache_salt, request_id)
        return await self._do(pairs_call(self._settings.limits, pairs, options, more))

    async def classify(
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
        """Classify texts; see `Client.classify`."""
        more = RequestOptions(model, priority, cache_salt, request_id)
        limits = self._settings.limits
        return await self._do(
            classify_call(limits, texts, query, labels, max_tokens_per_doc, truncate, more)
        )

    async def decide(
        self,
        text: str,
        questions: Iterable[Question],
        *,
        model: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> list[Decision]:
        """Answer questions; see `Client.decide`."""
        more = RequestOptions(model, priority, cache_salt, request_id)
        return await self._do(decide_call(self._settings.limits, text, questions, more))

    async def system_one(
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
        """Answer questions; see `Client.system_one`."""
        more = RequestOptions(model, priority, cache_salt, request_id)
        limits = self._settings.limits
        return await self._do(system_one_call(limits, state, questions, instructions, more))

    async def completions(
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
        """Return log-probabilities of prompts; see `Client.completions`."""
        call = completions_call(
            self._settings.limits,
            prompts,
            max_tokens=max_tokens,
            echo=echo,
            logprobs=logprobs,
            add_special_tokens=add_special_tokens,
            more=RequestOptions(model, priority, cache_salt, request_id),
        )
        return await self._do(call)
