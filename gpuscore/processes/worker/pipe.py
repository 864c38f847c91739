"""One end of the connection between the server and an engine's process.

A frame is a length of four little-endian bytes, then a message's bytes.
"""

import logging
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from gpuscore.processes.worker.wire import ProtocolError

logger = logging.getLogger(__name__)

MAX_FRAME = 2**30  # bytes; the largest request and result of the default limits take about 10 MiB
_HEAD = struct.Struct("<I")
_PIECE = 2**20


class Pipe:
    """A connection over a stream socket. One thread reads, and sends what all threads put.

    So `put` waits neither for a full pipe nor for the encoding of a large message.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._woken, self._waker = socket.socketpair()
        for end in (sock, self._woken, self._waker):
            end.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._queue: deque[Callable[[], bytes]] = deque()
        self._sending = threading.Lock()  # held by the thread that takes messages from the queue
        self._out = bytearray()  # of messages that are sent in part
        # One for the whole time: a new block of this size for each receive, then cut to what came,
        # would split the heap into pieces too small for the next batch.
        self._received = memoryview(bytearray(_PIECE))
        self._in = bytearray()

    @property
    def idle(self) -> bool:
        """True if all that was put is sent."""
        return not (self._queue or self._out or self._sending.locked())

    def put(self, *messages: Callable[[], bytes], now: bool = False) -> None:
        """Queue messages, to be sent in this order; never blocks.

        Args:
            messages: functions that encode one each.
            now: if nothing else is to be sent, encode and send them in the caller's thread, as far
                as the pipe has room. That is faster than to wake the reading thread, which sends
                messages together that came meanwhile: so only for a request that is alone.
        """
        now = now and self.idle
        self._queue.extend(messages)
        if now and self._sending.acquire(blocking=False):
            try:
                self._send()
            finally:
                self._sending.release()
        if not self.idle:
            with suppress(OSError):  # it was woken already, or is closed
                self._waker.send(b"\0")

    def read(self, seconds: float | None = None) -> list[bytes]:
        """Send what is queued and receive once; return the complete frames.

        Args:
            seconds: to wait for data, or for messages to send; None: as long as it takes.

        Raises:
            EOFError: the other side has closed or is gone.
            ProtocolError: a frame's length is over MAX_FRAME.
        """
        self._poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._out else 0))
        ready = dict(self._poll.poll(None if seconds is None else seconds * 1000))
        if ready.pop(self._woken.fileno(), None):
            self._woken.recv(_PIECE)
        if not self.idle:
            with self._sending:
                self._send()
        received = ready.get(self._sock.fileno(), 0) & ~select.POLLOUT
        return self._receive() if received else []

    def close(self) -> None:
        """Close the sockets; what is queued is not sent."""
        with self._sending:
            for end in (self._sock, self._woken, self._waker):
                end.close()

    def _receive(self) -> list[bytes]:
        try:
            size = self._sock.recv_into(self._received)
        except ConnectionError:
            size = 0
        if not size:
            raise EOFError
        self._in += self._received[:size]
        frames, start = [], 0
        while len(self._in) - start >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._in, start)
            if size > MAX_FRAME:
                raise ProtocolError(f"a frame of {size} bytes, the limit is {MAX_FRAME}")
            end = start + _HEAD.size + size
            if end > len(self._in):
                break
            frames.append(bytes(memoryview(self._in)[start + _HEAD.size : end]))
            start = end
        del self._in[:start]
        return frames

    def _send(self) -> None:
        """Send small messages in one system call, because each call wakes the other process."""
        try:
            while self._queue or self._out:
                while self._queue and len(self._out) < _PIECE:
                    frame = self._queue.popleft()()
                    self._out += _HEAD.pack(len(frame))
                    self._out += frame
                if self._out:
                    del self._out[: self._sock.send(self._out)]
        except BlockingIOError:
            pass  # `read` goes on when there is room
        except OSError:  # the other side is gone, as `read` will tell
            self._queue.clear()
            self._out.clear()
        except Exception:
            logger.exception("a message could not be sent")
            # Both sides see the end and give up, instead of waiting for the lost message.
            self._sock.shutdown(socket.SHUT_RDWR)
