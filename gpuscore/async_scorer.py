"""`AsyncScorer`: scoring in this process, for asyncio."""

import asyncio
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TypeVar

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

ValueT = TypeVar("ValueT")


class AsyncScorer(LoadedScorer):
    """`Scorer` for asyncio: the same methods, which let other tasks run while they wait.

    Texts are prepared in threads. A cancelled call drops its work that has not begun.
    """

    async def score(
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
    ) -> Scores:
        """See `Scorer.score`."""
        options = CallOptions(
            labels, label_token_ids, apply_softmax, temperature, item_first, logprobs, logits
        )
        call = await asyncio.to_thread(score_call, self._prompts, query, items, options)
        return call if isinstance(call, Scores) else await self._finish(call)

    async def rerank(
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
        """See `Scorer.rerank`."""
        call = partial(
            rerank_call,
            self._prompts,
            query,
            documents,
            top_n=top_n,
            instruction=instruction,
            raw_scores=raw_scores,
            max_tokens_per_doc=max_tokens_per_doc,
            truncate=truncate,
        )
        return await self._run(call)

    async def score_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        instruction: str | None = None,
        raw_scores: bool = False,
        max_tokens_per_doc: int | None = None,
        truncate: bool = False,
    ) -> PairScores:
        """See `Scorer.score_pairs`."""
        call = partial(
            pairs_call,
            self._prompts,
            pairs,
            instruction=instruction,
            raw_scores=raw_scores,
            max_tokens_per_doc=max_tokens_per_doc,
            truncate=truncate,
        )
        return await self._run(call)

    async def classify(
        self,
        texts: str | Sequence[str],
        *,
        query: str | None = None,
        labels: Labels = None,
        max_tokens_per_doc: int | None = None,
        truncate: bool = False,
    ) -> Classification:
        """See `Scorer.classify`."""
        given = classify_input(texts, query, labels, max_tokens_per_doc, truncate)
        return await self._run(partial(classify_call, self._prompts, given))

    async def decide(self, text: str, questions: Sequence[Question]) -> list[Decision]:
        """See `Scorer.decide`."""
        return await self._run(partial(decide_call, self._prompts, text, questions))

    async def _run(self, prepare: "partial[Call[ValueT]]") -> ValueT:
        return await self._finish(await asyncio.to_thread(prepare))

    async def _finish(self, call: Call[ValueT]) -> ValueT:
        return call.finish(await asyncio.wrap_future(self._engine.score(call.request)))

    async def __aenter__(self) -> "AsyncScorer":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)
