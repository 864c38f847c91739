"""A client that has closed its side: has it left, or does it only send no more and wait?

Both look the same to a socket. A client that has left answers the next bytes with a reset; one that
waits (`printf ... | nc -N`, shutdown(SHUT_WR)) takes them. So a scoring request that takes longer
than a moment is asked for by an interim answer, 100 Continue, which any client of HTTP/1.1 discards
where it has not asked for it (RFC 9110, 15.2.1). HTTP/1.0 knows no interim answers: a client of it
counts as one that has left. Everything else is answered soon enough not to ask.
"""

import asyncio
import socket

from gpuscore.server.http.exchange import CONTINUE, Exchange

MOMENT = 0.1  # seconds until the client is asked
FIRST_LOOK, LAST_LOOK = 0.02, 1.0  # seconds between two looks for its reset: the first, the longest


class Departure:
    """Aborts the connection if its client has left before `exchange` is answered."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, exchange: Exchange
    ) -> None:
        self._loop, self._transport, self._exchange = loop, transport, exchange
        self._timer: asyncio.TimerHandle | None = None
        if exchange.scoring:
            self._timer = loop.call_later(MOMENT, self._ask)

    def close(self) -> None:
        """The connection is lost."""
        if self._timer is not None:
            self._timer.cancel()

    def _ask(self) -> None:
        if self._exchange.written:
            return  # writing it tells
        if self._exchange.scope["http_version"] == "1.0":
            self._transport.abort()
            return
        self._transport.write(CONTINUE)
        self._look_after(FIRST_LOOK)

    def _look_after(self, seconds: float) -> None:
        def look() -> None:
            connected: socket.socket = self._transport.get_extra_info("socket")
            # The transport reads no more, so it would not see the reset.
            if connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._transport.abort()
            else:
                self._look_after(min(2 * seconds, LAST_LOOK))

        self._timer = self._loop.call_later(seconds, look)
