"""Rounds of the event loop and deadlines of connections.

A round handles the events that were ready when it began. Later events wait for the next round, so
the length of a round is the delay of the server. A late round accepts fewer connections.

A connection has deadlines for bytes that it reads, for a client that must take its answer, and for
one that has closed its side. Such a client has left, or still waits for its answer. Both look the
same to a socket. A client that has left answers the next bytes with a reset; one that waits
(`printf ... | nc -N`, shutdown(SHUT_WR)) takes them. So if a scoring request takes longer than
MOMENT, the server sends an interim answer, 100 Continue. Every HTTP/1.1 client discards one that it
did not ask for (RFC 9110, 15.2.1). HTTP/1.0 has no interim answers, so a client of it counts as one
that has left. All other requests are answered so soon that no test is needed.
"""

import asyncio
import selectors
import socket
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from gpuscore.server.http.descriptors import EXHAUSTED, log_error
from gpuscore.server.http.exchange import CONTINUE, Exchange

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

    asyncio accepts up to its whole backlog in one go, and looks again in the next round. If the
    process has no descriptors left, each further attempt would be logged as an error; so the first
    one ends the round's attempts, and asyncio looks again a second later.
    """

    _rounds: Rounds
    _round = -1
    _accepted = 0

    def count_in(self, rounds: Rounds) -> None:
        """Count the connections of each round of this loop; call it before the first connection."""
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


class Outlet:
    """The bytes on their way to a client.

    Args:
        transport: the connection's transport.
        seconds: time in which the client must take some of the bytes that wait for it.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, seconds: float
    ) -> None:
        self._loop, self._transport, self._seconds = loop, transport, seconds
        self._sent = 0  # bytes written to the transport, sent or still in its buffer
        self._timer: asyncio.TimerHandle | None = None  # set while that buffer is not empty
        self._drained: asyncio.Future[None] | None = None  # set while that buffer is too full

    @property
    def full(self) -> bool:
        """True if too many bytes wait for the client to make a further answer."""
        return self._drained is not None

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)
            self._sent += len(data)
            if self._timer is None and self._transport.get_write_buffer_size():
                self._watch()

    async def drain(self) -> None:
        """Return once the client has taken most of the written bytes, or has left."""
        while self._drained is not None:
            await asyncio.shield(self._drained)

    def fill(self) -> None:
        if self._drained is None:
            self._drained = self._loop.create_future()

    def empty(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    def close(self) -> None:
        """Stop watching and wake all who wait in `drain`, because the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
        self.empty()

    def _watch(self) -> None:
        """Check again later, and drop a client that has taken no byte of its answer by then.

        A connection that is being closed is watched, too: its transport would wait for ever.
        """
        taken = self._sent - self._transport.get_write_buffer_size()

        def look() -> None:
            self._timer = None
            left = self._transport.get_write_buffer_size()
            if left and self._sent - left <= taken:
                self._transport.abort()
            elif left:
                self._watch()

        self._timer = self._loop.call_later(self._seconds, look)


# Bytes of a body that is read after its answer are dropped at this pace, some 25 MB/s: a client
# that goes on sending costs next to nothing; one that sends all before it reads gets its answer.
REST_READ, REST_PAUSE = 2**16, 0.0025  # bytes of a read, seconds to the next


class Remainder:
    """The pace at which a connection reads the rest of a body whose request is answered.

    Args:
        most: bytes of a body that are read; then no more are.
        rested: called when the next read may come.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, most: int, rested: Callable[[], None]
    ) -> None:
        self._loop, self._most, self._rested = loop, most, rested
        self._left: int | None = None  # bytes that may be read; None: no body is dropped
        self._timer: asyncio.TimerHandle | None = None
        self.resting = False

    def begin(self) -> None:
        self._left = self._most

    def took(self, size: int) -> None:
        """Count bytes that were read, and rest before the next read."""
        if self._left is None:
            return
        self._left -= size
        self.resting = True
        if self._left > 0 and self._timer is None:
            self._timer = self._loop.call_later(REST_PAUSE * size / REST_READ, self._go_on)

    def end(self) -> None:
        """Read at full speed again: the body has ended, or the connection is lost."""
        self._left, self.resting = None, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go_on(self) -> None:
        self._timer, self.resting = None, False
        self._rested()


MOMENT = 0.1  # seconds until the interim answer is sent
FIRST_LOOK, LAST_LOOK = 0.02, 1.0  # seconds to the next check for a reset: first and longest


class Departure:
    """A watch on a closed side: aborts the connection if the client has left before its answer."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, exchange: Exchange
    ) -> None:
        self._loop, self._transport, self._exchange = loop, transport, exchange
        self._timer: asyncio.TimerHandle | None = None
        if exchange.scoring:
            self._timer = loop.call_later(MOMENT, self._ask)

    def close(self) -> None:
        """Stop watching, because the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()

    def _ask(self) -> None:
        if self._exchange.written:
            return  # writing the answer shows if the client has left
        if self._exchange.scope["http_version"] == "1.0":
            self._transport.abort()
            return
        self._transport.write(CONTINUE)
        self._look_after(FIRST_LOOK)

    def _look_after(self, seconds: float) -> None:
        def look() -> None:
            connected: socket.socket = self._transport.get_extra_info("socket")
            # The transport has stopped reading, so it would not notice the reset.
            if connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._transport.abort()
            else:
                self._look_after(min(2 * seconds, LAST_LOOK))

        self._timer = self._loop.call_later(seconds, look)
