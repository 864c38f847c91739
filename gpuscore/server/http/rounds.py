"""Rounds of the event loop: when the one under way began, and how many connections it takes in.

A round handles what was ready when it began. What becomes ready meanwhile waits for the next, so
the length of a round is how late the server is.
"""

import asyncio
import selectors
import socket
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

ACCEPTS = 128  # connections taken in per round; the kernel keeps the others
FEW = 64  # of them in a round that is late: enough that who is to be refused hears of it soon
LATE = 0.5  # seconds; the age of a late round
# Of a round's length, per piece of work in the next. A round begins requests and ends others, half
# a millisecond or so each, so work gets about half of the time, however many sockets there are to
# read and to refuse. Much more would keep rounds long once they are.
PIECE = 0.002
TURNS = 8  # connections that get on with what they have put off, in a round


class Rounds(selectors.DefaultSelector):
    """The loop's selector, which is where a round begins."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.began = monotonic()
        self._last = 0.0  # seconds that the round before took

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._last = self.age
        ready = super().select(timeout)
        self.number += 1
        self.began = monotonic()
        return ready

    def pieces(self, few: int) -> int:
        """How many requests the round should begin, or end; `few` of a short one."""
        return max(few, int(self._last / PIECE))

    @property
    def age(self) -> float:
        """Seconds since the round began."""
        return monotonic() - self.began


class Postponed:
    """Work that connections have put off, because one of them could take a round for itself: so
    many pieces of it in each round, in the order in which they came."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._waiting: deque[Callable[[], None]] = deque()
        self._due = False  # `_run`, in the next round

    def add(self, piece: Callable[[], None]) -> None:
        """Have `piece` called in a later round."""
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
    """A listening socket that says it has nothing to accept when the loop has enough to do.

    asyncio accepts up to its whole backlog in one go, and looks again in the next round.
    """

    rounds: Rounds
    _round = -1
    _accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self._round != self.rounds.number:
            self._round, self._accepted = self.rounds.number, 0
        if self._accepted >= (FEW if self.rounds.age > LATE else ACCEPTS):
            raise BlockingIOError
        self._accepted += 1
        return super().accept()
