"""One run of the engine's process, as its parent sees it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from gpuscore.config import API_KEY_VARIABLE
from gpuscore.worker.frames import FrameReader, FrameWriter


@contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[None]:
    """For this thread and what it starts: the child ignores them, but not yet while its interpreter
    starts. Other threads of this process take them meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class EngineProcess:
    """Starts the process with one end of a socket pair; `end` leaves nothing of it.

    On Linux it is to be started from a thread that lives as long as it is wanted: the child asks
    the kernel to be killed with its parent, and the kernel takes the starting thread for that.
    """

    def __init__(self, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        try:
            # No keys for a process that has no door. Nothing is inherited but its own socket, and
            # what it prints goes where logs go: standard output belongs to the server.
            environment = {k: v for k, v in os.environ.items() if k != API_KEY_VARIABLE}
            with _blocked(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = ours
        self.reader = FrameReader(ours)
        self.writer = FrameWriter(ours, "engine-writer")

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self, seconds: float = 0.0) -> str:
        """Wait that long, then kill; returns how the process ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with suppress(OSError):  # the other end may be gone
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a writer that waits for a full pipe
        self.writer.close()
        self.writer.join(1.0)
        self._socket.close()
        code = self._process.returncode
        return f"exit code {code}" if code >= 0 else f"signal {-code}"


TORCH = "gpuscore.backends:prepare"


def command(factory: str = TORCH) -> list[str]:
    """What starts the process, for `EngineClient`; -P keeps the working directory off sys.path."""
    return [sys.executable, "-P", "-m", "gpuscore.worker", factory]
