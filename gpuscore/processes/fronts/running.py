"""A running front, as its parent sees it."""

import os
import signal
import socket
from contextlib import suppress

from gpuscore.processes.fronts.messages import Ended
from gpuscore.processes.worker.frames import FrameReader, FrameWriter


class RunningFront:
    """The parent's end of a front's control socket, and what the front has said."""

    def __init__(self, seat: int, sock: socket.socket) -> None:
        self.seat, self.sock = seat, sock
        self.pid: int | None = None
        self.served = False
        self.ended: Ended | None = None
        self.silence = 0.0  # seconds since its last message
        self.reader = FrameReader(sock)
        self.writer = FrameWriter(sock, "front-writer")

    def kill(self) -> None:
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
