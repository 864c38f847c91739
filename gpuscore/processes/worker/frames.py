"""Frames over a stream socket: a length of four little-endian bytes, then a MessagePack message."""

import logging
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from gpuscore.processes.worker.wire import Message, ProtocolError, encode

logger = logging.getLogger(__name__)

MAX_FRAME = 2**30  # bytes; the largest request and result of the default limits take about 10 MiB
_HEAD = struct.Struct("<I")
_PIECE = 2**20
_BULK = 2**14  # bytes; far more than the heartbeats that arrive within a supervisor's tick

Make = Callable[[], bytes | None]  # encodes a message; None if it is not needed any more


class Send(Protocol):
    """A function that queues messages to be sent in this order, as `FrameWriter.put`."""

    def __call__(self, *messages: Make, now: bool = False) -> None: ...


class FrameReader:
    """Reader of the frames that arrive; it never blocks for the rest of a partial frame."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        # One for the whole time: a new block of this size for each receive, then cut to what came,
        # would split the heap into pieces too small for the next batch.
        self._received = memoryview(bytearray(_PIECE))
        self._buffer = bytearray()
        self.in_bulk = False  # True if the last receive got at least _BULK bytes

    def wait(self, seconds: float | None) -> bool:
        """Wait for data or the connection's end; return False if neither comes in time."""
        return bool(self._poll.poll(None if seconds is None else seconds * 1000))

    def read(self) -> list[bytes]:
        """Receive once, blocking until there is data; return the complete frames, if any.

        Raises:
            EOFError: the other side has closed or is gone.
            ProtocolError: a frame's length is over MAX_FRAME.
        """
        try:
            size = self._sock.recv_into(self._received)
        except ConnectionError:
            size = 0
        if not size:
            raise EOFError
        self.in_bulk = size >= _BULK
        self._buffer += self._received[:size]
        return self._complete()

    def _complete(self) -> list[bytes]:
        frames, start = [], 0
        while len(self._buffer) - start >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._buffer, start)
            if size > MAX_FRAME:
                raise ProtocolError(f"a frame of {size} bytes, the limit is {MAX_FRAME}")
            end = start + _HEAD.size + size
            if end > len(self._buffer):
                break
            frames.append(bytes(memoryview(self._buffer)[start + _HEAD.size : end]))
            start = end
        del self._buffer[:start]
        return frames


class FrameWriter:
    """A thread that encodes messages and sends them in order.

    So `put` waits neither for a full pipe nor for the encoding of a large message.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        self._queue: deque[Make] = deque()
        self._rest = bytearray()  # of a message that a caller has sent in part; before the queue
        self._condition = threading.Condition()
        self._closing = False
        self._sending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        return not (self._queue or self._rest or self._sending)

    def put(self, *messages: Make, now: bool = False) -> None:
        """Queue messages; never blocks.

        Args:
            now: if the thread has nothing to do, encode and send them in the caller's thread, as
                far as the pipe has room. That is faster than to wake the thread, but the thread
                sends messages together that came meanwhile: so only for a request that is alone.
        """
        with self._condition:
            if now and self.idle:
                self._sending = True  # encoding it may lead to another message
                self._try(messages, now=True)
                self._sending = False
            else:
                self._queue.extend(messages)
            if self._queue or self._rest:
                self._condition.notify()

    def send(self, message: Message) -> None:
        self.put(lambda: encode(message))

    def close(self, seconds: float = 1.0) -> None:
        """Send the queued messages and end the thread; wait for that at most this long."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join(seconds)

    def hang_up(self) -> None:
        """End the connection without waiting for the other side; close the socket."""
        with suppress(OSError):  # the other end may be gone
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a full socket
        self.close()
        self._sock.close()

    def _run(self) -> None:
        while (messages := self._next()) is not None and self._try(messages):
            pass

    def _next(self) -> list[Make] | None:
        """Wait for work and return all queued messages; None once it is closed and has sent all."""
        with self._condition:
            self._sending = False
            while not (self._queue or self._rest or self._closing):
                self._condition.wait()
            messages = list(self._queue)
            self._queue.clear()
            self._sending = bool(messages or self._rest)
            return messages if self._sending else None

    def _try(self, messages: Sequence[Make], *, now: bool = False) -> bool:
        """Send messages as `_send` does; return False if the connection is at its end."""
        try:
            self._send(messages, now)
        except OSError:
            return False  # the other side is gone; the reader reports it
        except Exception:
            logger.exception("a message could not be sent")
            # Both sides see the end and give up, instead of waiting for the lost message.
            self._sock.shutdown(socket.SHUT_RDWR)
            return False
        return True

    def _send(self, messages: Sequence[Make], now: bool) -> None:
        """Send small messages in one system call, because each call wakes the other process.

        With `now` only as much is sent as the pipe has room for.
        """
        buffer, self._rest = self._rest, bytearray()
        for make in messages:
            frame = make()
            if frame is None:
                continue
            buffer += _HEAD.pack(len(frame))
            buffer += frame
            if len(buffer) >= _PIECE and not now:
                self._sock.sendall(buffer)
                buffer = bytearray()
        if now and buffer:
            with suppress(BlockingIOError):
                del buffer[: self._sock.send(buffer, socket.MSG_DONTWAIT)]
            self._rest = buffer
        elif buffer:
            self._sock.sendall(buffer)
