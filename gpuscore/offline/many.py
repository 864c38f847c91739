"""Many calls in a row, of which several are in the engine at a time."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import Future
from typing import TypeVar

from gpuscore.errors import GpuscoreError
from gpuscore.offline.calls import Call
from gpuscore.types.request import ScoreRequest, ScoreResult

# `score_many` keeps this many batches' tokens in the engine, so that it never waits for texts.
AHEAD = 8

ValueT = TypeVar("ValueT")
Submit = Callable[[ScoreRequest], "Future[ScoreResult]"]


def in_order(
    calls: Iterator[Call[ValueT]], submit: Submit, most: int
) -> Generator[ValueT, None, None]:
    """Yield the values of calls in their order.

    Calls that have not begun are dropped if the iterator is closed early, or after an error.

    Args:
        calls: prepared one by one; may raise GpuscoreError.
        submit: passes a request to the engine.
        most: no further call is prepared while requests of more than this number of tokens wait.

    Raises:
        GpuscoreError: the first error in the order of the calls; the values before it have come.
    """
    waiting: deque[tuple[Call[ValueT], Future[ScoreResult] | None]] = deque()
    ahead, failure = 0, None
    try:
        while True:
            try:
                call = next(calls, None)
            except GpuscoreError as error:
                failure = error
                break
            if call is None:
                break
            waiting.append((call, None if call.request is None else submit(call.request)))
            ahead += call.num_tokens
            while ahead > most and len(waiting) > 1:
                ahead -= waiting[0][0].num_tokens
                yield _value(*waiting.popleft())
        while waiting:
            yield _value(*waiting.popleft())
        if failure is not None:
            raise failure
    finally:
        failure = None  # its frames refer to this one
        for _, future in waiting:
            if future is not None:
                future.cancel()


async def iterated(values: Generator[ValueT, None, None]) -> AsyncGenerator[ValueT, None]:
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


def _value(call: Call[ValueT], future: "Future[ScoreResult] | None") -> ValueT:
    return call.finish(None if future is None else future.result())
