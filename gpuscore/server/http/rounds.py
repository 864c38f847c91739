"""Rounds of the event loop.

A round handles the events that were ready when it began. Later events wait for the next round, so
the length of a round is the delay of the server.
"""

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeVar

from gpuscore.errors import GpuscoreError

ResultT = TypeVar("ResultT")

# For each PIECE seconds that a round took, the next may do one piece of work. A piece is the start
# or the end of a request, about half a millisecond. Starts and ends are counted separately, so
# work gets about half of the time, however many sockets must be read and refused. If work got much
# more, long rounds would stay long.
PIECE = 0.002


class Rounds(selectors.DefaultSelector):
    """The loop's selector; a round begins when `select` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.began = monotonic()
        self._last = 0.0  # seconds that the previous round took

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._last = monotonic() - self.began
        ready = super().select(timeout)
        self.began = monotonic()
        return ready

    def pieces(self, few: int) -> int:
        """Return how many requests this round may start, or end: at least `few`."""
        return max(few, int(self._last / PIECE))

    @property
    def ready(self) -> bool:
        """True if a socket that the loop watches can be read, accepted from or written to now."""
        return bool(super().select(0))


async def in_time(
    awaitable: Awaitable[ResultT], deadline: float, late: Callable[[], GpuscoreError]
) -> ResultT:
    """Return the result of `awaitable`; at `deadline`, a time of `monotonic`, cancel it and raise
    the error from `late`."""
    try:
        async with asyncio.timeout_at(deadline) as limit:
            return await awaitable
    except TimeoutError:
        if not limit.expired():  # raised by the awaitable itself
            raise
        raise late() from None
