"""Clients that have closed their side: find out if one has left or still waits for its answer.

Both look the same to a socket. A client that has left answers the next bytes with a reset; one that
waits (`printf ... | nc -N`, shutdown(SHUT_WR)) takes them. So if a scoring request takes longer
than MOMENT, the server sends an interim answer, 100 Continue. Every HTTP/1.1 client discards one
that it did not ask for (RFC 9110, 15.2.1). HTTP/1.0 has no interim answers, so a client of it
counts as one that has left. All other requests are answered so soon that no test is needed.
"""

import asyncio
import socket

from gpuscore.server.http.exchange import CONTINUE, Exchange

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
