"""A connection's deadline. It moves often and rarely passes."""

import asyncio
from collections.abc import Callable

NEVER = float("inf")


class Deadline:
    """A deadline that calls `met` when it passes.

    Moving it to a later time leaves the timer alone: the timer fires early and is then set again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, met: Callable[[], None]) -> None:
        self._loop, self._met = loop, met
        self._when = NEVER
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._when != NEVER

    def set(self, seconds: float) -> None:
        self._when = when = self._loop.time() + seconds
        if self._timer is not None and self._timer.when() > when:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(when, self._look)

    def clear(self) -> None:
        self._when = NEVER

    def close(self) -> None:
        self.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._when <= self._loop.time():
            self.clear()
            self._met()
        elif self._when != NEVER:
            self._timer = self._loop.call_at(self._when, self._look)
