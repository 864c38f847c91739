"""A running front, as its parent sees it."""

import os
import signal
import socket
from contextlib import suppress

from gpuscore.processes.fronts.messages import Ended
from gpuscore.processes.worker.frames import FrameReader, FrameWriter
from gpuscore.processes.worker.messages import Message, encode


class RunningFront:
    """The parent's end of a front's control socket, and what the front has said."""

    def __init__(self, seat: int, sock: socket.socket) -> None:
        self.seat, self.sock = seat, sock
        self.pid: int | None = None
        self.served = False
        self.ended: Ended | None = None
        self.silence = 0.0  # seconds since its last message
        self.reader = FrameReader(sock)
        self._writer = FrameWriter(sock, "front-writer")

    def send(self, message: Message) -> None:
        self._writer.put(lambda: encode(message))

    def close(self) -> None:
        with suppress(OSError):  # the other end may be gone
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes a writer that waits for a full socket
        self._writer.close()
        self._writer.join(1.0)
        self.sock.close()

    def kill(self) -> None:
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
