"""Starts and ends the engine process; this code runs in the parent."""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from subprocess import DEVNULL, Popen, TimeoutExpired

from gpuscore.config import API_KEY_VARIABLE
from gpuscore.exits import STOPS
from gpuscore.processes.worker.wire import Pipe

END_SECONDS = 1.0  # a process that has not ended by itself after this time is killed
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Patience:
    """When to kill or restart a child, in seconds. A ready child sends a heartbeat every 0.25 s."""

    silent: float = 1.5  # without a heartbeat for this long, the child counts as unhealthy
    stopped: float = 5.0  # without a heartbeat for this long, the child is killed
    delay: float = 1.0  # how long to wait before a restart
    forgiven: float = 60.0  # after serving for this long, earlier failures are forgotten
    max_failures: int = 5  # after this many failures in a row, the child is not restarted


def ignore_stops() -> None:
    """Ignore the signals STOPS, which the parent handles, and unblock them for child processes."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def die_with(parent: int) -> None:
    """End this process when its parent ends.

    On Linux the kernel does it, so it works even if this process is too busy to see its socket
    close.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class EngineProcess:
    """A running engine process, connected by a socket pair. `end` stops it.

    Args:
        command: the command line; the socket's number and this process's id are appended.

    On Linux, create it in a thread that outlives the child. The child asks the kernel to kill it
    when its parent dies, and by "parent" the kernel means the thread that started the child.
    """

    def __init__(self, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        # A terminal or a service manager may signal all processes. Until the child ignores these
        # signals they would end it, so it starts with them blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            # The child serves no clients, so it gets no API keys. It inherits only its socket. Its
            # standard output is the server's standard error, because the server prints on stdout.
            environment = {k: v for k, v in os.environ.items() if k != API_KEY_VARIABLE}
            self._process = Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ else DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # Ctrl-C is for the parent, which drains
            )
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self.pid = self._process.pid
        self.pipe = Pipe(ours)

    def end(self) -> str:
        """Close the socket, so that the process ends, or kill it after END_SECONDS.

        Return its exit code or signal as text.
        """
        self.pipe.close()
        try:
            self._process.wait(END_SECONDS)
        except TimeoutExpired:
            self._process.kill()
            self._process.wait()
        code = self._process.returncode
        return f"exit code {code}" if code >= 0 else f"signal {-code}"


DEFAULT_FACTORY = "gpuscore.backends:prepare"


def command(factory: str = DEFAULT_FACTORY) -> list[str]:
    """Return the command line for `EngineClient`; -P keeps the working directory off sys.path."""
    return [sys.executable, "-P", "-m", "gpuscore.processes.worker", factory]
