"""The bytes on their way to a client, and the flow control of both ways."""

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl


class Outlet:
    """A transport's writing side: joins an answer's head with the first part of its body, drops a
    client that takes nothing, and closes so that the client can still read its answer.

    Closing a socket with unread bytes resets its connection, and an answer on its way is lost.

    Args:
        transport: the connection's transport.
        seconds: time in which the client must take some of the bytes that wait for it.
        unread: returns True while the client may still be sending a request that is not wanted.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        seconds: float,
        unread: Callable[[], bool],
    ) -> None:
        self.lingers = False  # closed, but bytes are still read
        self._loop, self._transport = loop, transport
        self._seconds, self._unread = seconds, unread
        self._holds, self._held = False, b""
        self._sent = 0  # bytes written to the transport, sent or still in its buffer
        self._timer: asyncio.TimerHandle | None = None  # set while that buffer is not empty

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def hold(self) -> None:
        """Keep the next bytes until more are written."""
        self._holds = True

    def write(self, data: bytes) -> None:
        if self._holds:
            self._holds, self._held = False, data
        elif not self.is_closing():
            data, self._held = self._held + data, b""
            self._transport.write(data)
            self._sent += len(data)
            if self._timer is None and self._transport.get_write_buffer_size():
                self._watch()

    def flush(self) -> None:
        """Write what is held."""
        if self._held:
            self.write(b"")

    def close(self) -> None:
        """Close once all is sent; until the owner closes the transport, a client that still sends
        sees only that nothing more will come."""
        self.flush()
        if self.lingers or not self._unread():
            self._transport.close()
        elif not self._transport.is_closing():
            self.lingers = True
            try:
                self._transport.write_eof()
            except OSError:  # the client has left
                self._transport.abort()

    def stop(self) -> None:
        """Stop watching, because the connection is lost, and forget its owner."""
        self._unread = bool
        if self._timer is not None:
            self._timer.cancel()

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


class Flow(FlowControl):
    """uvicorn's flow control, of which the connection itself decides when to read: it is woken."""

    def __init__(self, transport: asyncio.Transport, wake: Callable[[], None]) -> None:
        super().__init__(transport)
        self.resume_reading = wake  # type: ignore[method-assign]
