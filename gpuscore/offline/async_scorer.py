"""`AsyncScorer`: scoring in this process, for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

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
from gpuscore.offline.many import AHEAD, in_order, iterated
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
        label_sequences: LabelSequences = None,
        label_length_normalization: Normalization = "none",
        apply_softmax: bool = False,
        temperature: float = 1.0,
        item_first: bool = False,
        logprobs: bool = False,
        on_error: OnError = "fail",
        logits: bool = False,
    ) -> Scores:
        """See `Scorer.score`."""
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
        return await self._run(partial(score_call, self._prompts, query, items, options))

    async def score_many(
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
    ) -> AsyncGenerator[Scores, None]:
        """See `Scorer.score_many`; iterate with `async for`. `requests` is read in threads."""
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
        most = AHEAD * self._backend.limits.max_tokens
        async for scores in iterated(in_order(calls, self._engine.score, most)):
            yield scores

    async def rerank(
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
        """See `Scorer.rerank`."""
        options = FamilyOptions(instruction, raw_scores, max_tokens_per_doc, truncate, on_error)
        return await self._run(
            partial(rerank_call, self._prompts, query, documents, top_n, options)
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
    ) -> PairScores:
        """See `Scorer.score_pairs`."""
        options = FamilyOptions(instruction, raw_scores, max_tokens_per_doc, truncate, on_error)
        return await self._run(partial(pairs_call, self._prompts, pairs, options))

    async def classify(
        self,
        texts: str | Iterable[str],
        *,
        query: str | None = None,
        labels: Labels = None,
        max_tokens_per_doc: int | None = None,
        truncate: bool = False,
    ) -> Classification:
        """See `Scorer.classify`."""
        return await self._run(
            partial(
                classify_call, self._prompts, texts, query, labels, max_tokens_per_doc, truncate
            )
        )

    async def decide(self, text: str, questions: Iterable[Question]) -> list[Decision]:
        """See `Scorer.decide`."""
        return await self._run(partial(decide_call, self._prompts, text, questions))

    async def system_one(
        self,
        state: Any,
        questions: Mapping[str, TypedQuestion],
        *,
        instructions: str | None = None,
    ) -> dict[str, TypedAnswer]:
        """See `Scorer.system_one`."""
        return await self._run(
            partial(system_one_call, self._prompts, state, questions, instructions)
        )

    async def _run(self, prepare: "partial[Call[ValueT]]") -> ValueT:
        call = await asyncio.to_thread(prepare)
        if call.request is None:
            return call.finish(None)
        result = await asyncio.wrap_future(self._engine.score(call.request))
        return call.finish(result)

    async def __aenter__(self) -> "AsyncScorer":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)
