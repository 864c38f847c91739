"""Rounds of the event loop: when the current one began, and how many connections it accepts.

A round handles the events that were ready when it began. Later events wait for the next round, so
the length of a round is the delay of the server.
"""

import asyncio
import selectors
import socket
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from gpuscore.server.http.descriptors import EXHAUSTED, log_error

ACCEPTS = 128  # connections accepted per round; the others wait in the kernel
FEW = 64  # connections accepted in a late round: enough that a refusal still comes soon
LATE = 0.5  # seconds; the age of a late round
# Seconds of a round's length that allow one piece of work in the next round. A piece, the start or
# the end of a request, takes about half a millisecond. Starts and ends are counted separately, so
# work gets about half of the time, however many sockets must be read and refused. If work got much
# more, long rounds would stay long.
PIECE = 0.002
TURNS = 8  # connections that continue postponed work in a round


class Rounds(selectors.DefaultSelector):
    """The loop's selector; a round begins when `select` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.began = monotonic()
        self._last = 0.0  # seconds that the previous round took

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return a loop that uses this selector."""
        loop = asyncio.SelectorEventLoop(self)
        loop.set_exception_handler(log_error)
        return loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._last = self.age
        ready = super().select(timeout)
        self.number += 1
        self.began = monotonic()
        return ready

    def pieces(self, few: int) -> int:
        """Return how many requests this round may start, or end: `few`, more after a long round."""
        return max(few, int(self._last / PIECE))

    @property
    def ready(self) -> bool:
        """True if a socket that the loop watches can be read, accepted from or written to now."""
        return bool(super().select(0))

    @property
    def age(self) -> float:
        """Seconds since the round began."""
        return monotonic() - self.began


class Postponed:
    """Postponed work of connections, a limited number of pieces per round, in order of arrival.

    Without it, one connection could occupy a whole round.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._waiting: deque[Callable[[], None]] = deque()
        self._due = False  # `_run` will be called in the next round

    def add(self, piece: Callable[[], None]) -> None:
        """Call `piece` in a later round."""
        self._waiting.append(piece)
        self._plan()

    def _plan(self) -> None:
        if self._waiting and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._due = False
        try:
            for _ in range(min(len(self._waiting), self._rounds.pieces(TURNS))):
                self._waiting.popleft()()
        finally:
            self._plan()


class Listener(socket.socket):
    """A listening socket that reports nothing to accept once a round has accepted enough.

    asyncio accepts up to its whole backlog in one go, and looks again in the next round. Without
    descriptors it would report every attempt; after the first it looks again a second later.
    """

    _rounds: Rounds
    _round = -1
    _accepted = 0

    def count_in(self, rounds: Rounds) -> None:
        """Count connections by the rounds of this loop from now on; due before the first one."""
        self._rounds = rounds

    def accept(self) -> tuple[socket.socket, Any]:
        if self._round != self._rounds.number:
            self._round, self._accepted = self._rounds.number, 0
        if self._accepted >= (FEW if self._rounds.age > LATE else ACCEPTS):
            raise BlockingIOError
        self._accepted += 1
        try:
            return super().accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                self._accepted = ACCEPTS
            raise
