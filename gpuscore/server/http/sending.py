"""The sending side of a connection, which drops a client that stops taking its answer."""

import asyncio


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
        """True if so many bytes wait for the client that no further answer should be made."""
        return self._drained is not None

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)
            self._sent += len(data)
            if self._timer is None and self._transport.get_write_buffer_size():
                self._watch()

    async def drain(self) -> None:
        """Return once the client has taken most of what was written, or has left."""
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
        """Check again later, and drop a client that has taken none of its answer by then.

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
