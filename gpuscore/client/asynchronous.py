"""The client for asyncio."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

from gpuscore.client.options import (
    ClassifyRequestOptions,
    FamilyRequestOptions,
    PromptRequestOptions,
    RequestOptions,
    ScoreRequestOptions,
)
from gpuscore.client.questions import decide_call, system_one_call
from gpuscore.client.results import (
    ClassifyResponse,
    CompletionsResponse,
    PairsResponse,
    RerankResponse,
    ScoreResponse,
)
from gpuscore.client.scores import pairs_call, rerank_call, score_call
from gpuscore.client.sending import AsyncSender
from gpuscore.client.texts import classify_call, completions_call
from gpuscore.types.call_arguments import Ids, Items, Text, takes_options
from gpuscore.types.questions import Decision, Question, TypedAnswer, TypedQuestion
from gpuscore.types.results import Document


class AsyncClient(AsyncSender):
    """`Client` for asyncio: same arguments (`http` is an httpx.AsyncClient), results and errors.

    Tasks may share it. Cancelling a call closes its requests, and the server drops their work.
    """

    @takes_options
    async def score(
        self, query: Text, items: Items, **options: Unpack[ScoreRequestOptions]
    ) -> ScoreResponse:
        """Score items; see `Client.score`."""
        return await self._do(score_call(self._settings.limits, query, items, options))

    @takes_options
    async def rerank(
        self,
        query: str,
        documents: Iterable[Document],
        top_n: int | None = None,
        *,
        rank_fields: Sequence[str] | None = None,
        **options: Unpack[FamilyRequestOptions],
    ) -> RerankResponse:
        """Rank documents; see `Client.rerank`."""
        limits = self._settings.limits
        return await self._do(rerank_call(limits, query, documents, top_n, rank_fields, options))

    @takes_options
    async def score_pairs(
        self, pairs: Iterable[tuple[str, str]], **options: Unpack[FamilyRequestOptions]
    ) -> PairsResponse:
        """Score pairs; see `Client.score_pairs`."""
        return await self._do(pairs_call(self._settings.limits, pairs, options))

    @takes_options
    async def classify(
        self, texts: str | Iterable[str], **options: Unpack[ClassifyRequestOptions]
    ) -> ClassifyResponse:
        """Classify texts; see `Client.classify`."""
        return await self._do(classify_call(self._settings.limits, texts, options))

    @takes_options
    async def decide(
        self, text: str, questions: Iterable[Question], **options: Unpack[RequestOptions]
    ) -> list[Decision]:
        """Answer questions; see `Client.decide`."""
        return await self._do(decide_call(self._settings.limits, text, questions, options))

    @takes_options
    async def system_one(
        self,
        state: Any,
        questions: Mapping[str, TypedQuestion],
        *,
        instructions: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> dict[str, TypedAnswer]:
        """Answer questions; see `Client.system_one`."""
        limits = self._settings.limits
        return await self._do(system_one_call(limits, state, questions, instructions, options))

    @takes_options
    async def completions(
        self,
        prompts: str | Ids | Iterable[str] | Iterable[Ids],
        **options: Unpack[PromptRequestOptions],
    ) -> CompletionsResponse:
        """Return log-probabilities of prompts; see `Client.completions`."""
        return await self._do(completions_call(self._settings.limits, prompts, options))
