"""`AsyncScorer`: scoring in this process, for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from gpuscore.offline.calls import (
    Call,
    classify_call,
    pairs_call,
    rerank_call,
    score_call,
    score_calls,
)
from gpuscore.offline.decisions import decide_call, system_one_call
from gpuscore.offline.scorer import LoadedScorer
from gpuscore.prompts.model import ModelPrompts
from gpuscore.types.call_arguments import (
    ClassifyOptions,
    FamilyOptions,
    Items,
    LocalScoreOptions,
    Text,
    takes_options,
)
from gpuscore.types.questions import Decision, Question, TypedAnswer, TypedQuestion
from gpuscore.types.results import Classification, PairScores, Ranking, Scores

ValueT = TypeVar("ValueT")
GivenP = ParamSpec("GivenP")


class AsyncScorer(LoadedScorer):
    """`Scorer` for asyncio: the same methods, which let other tasks run while they wait.

    Texts are prepared in threads. A cancelled call drops its work that has not begun.
    """

    @takes_options
    async def score(
        self, query: Text, items: Items, **options: Unpack[LocalScoreOptions]
    ) -> Scores:
        """See `Scorer.score`."""
        return await self._run(score_call, query, items, options)

    @takes_options
    async def score_many(
        self, requests: Iterable[tuple[Text, Items]], **options: Unpack[LocalScoreOptions]
    ) -> AsyncGenerator[Scores, None]:
        """See `Scorer.score_many`; iterate with `async for`. `requests` is read in threads."""
        async for scores in _iterated(self._many(score_calls(self._prompts, requests, options))):
            yield scores

    @takes_options
    async def rerank(
        self,
        query: str,
        documents: Iterable[str],
        top_n: int | None = None,
        **options: Unpack[FamilyOptions],
    ) -> Ranking:
        """See `Scorer.rerank`."""
        return await self._run(rerank_call, query, documents, top_n, options)

    @takes_options
    async def score_pairs(
        self, pairs: Iterable[tuple[str, str]], **options: Unpack[FamilyOptions]
    ) -> PairScores:
        """See `Scorer.score_pairs`."""
        return await self._run(pairs_call, pairs, options)

    @takes_options
    async def classify(
        self, texts: str | Iterable[str], **options: Unpack[ClassifyOptions]
    ) -> Classification:
        """See `Scorer.classify`."""
        return await self._run(classify_call, texts, options)

    async def decide(self, text: str, questions: Iterable[Question]) -> list[Decision]:
        """See `Scorer.decide`."""
        return await self._run(decide_call, text, questions)

    async def system_one(
        self,
        state: Any,
        questions: Mapping[str, TypedQuestion],
        *,
        instructions: str | None = None,
    ) -> dict[str, TypedAnswer]:
        """See `Scorer.system_one`."""
        return await self._run(system_one_call, state, questions, instructions)

    async def _run(
        self,
        prepare: Callable[Concatenate[ModelPrompts, GivenP], Call[ValueT]],
        *given: GivenP.args,
        **more: GivenP.kwargs,
    ) -> ValueT:
        call = await asyncio.to_thread(prepare, self._prompts, *given, **more)
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


async def _iterated(values: Generator[ValueT, None, None]) -> AsyncGenerator[ValueT, None]:
    """Yield the values, each computed in a thread; close the generator at an early end."""

    def end(step: "asyncio.Future[ValueT | None]") -> None:
        if not step.cancelled():
            step.exception()  # of a call that nobody awaits any more
        values.close()

    step = None
    try:
        while True:
            step = asyncio.ensure_future(asyncio.to_thread(next, values, None))
            value = await asyncio.shield(step)  # a thread goes on when its task is cancelled
            if value is None:
                return
            yield value
    finally:
        if step is not None:  # a generator cannot be closed while it runs
            step.add_done_callback(end)
