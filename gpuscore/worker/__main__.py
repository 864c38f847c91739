"""The composition root of the engine's process, which `gpuscore serve` starts.

    python -P -m gpuscore.worker MODULE:FUNCTION SOCKET PARENT

FUNCTION makes a `Prepared` of a directory and a `ModelConfig`, so a device's framework is imported
in this process only. SOCKET is the number of an inherited socket, PARENT the parent's process id.
"""

import signal

# First of all: a Ctrl-C, or a terminal's end, reaches every process of the terminal, but it is the
# parent that drains. It has started this process with these signals blocked.
if __name__ == "__main__":
    _PARENTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for _number in _PARENTS:
        signal.signal(_number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS)

import ctypes
import logging
import os
import socket
import sys
from contextlib import suppress
from importlib import import_module

from gpuscore.heap import use_one_arena
from gpuscore.log import LogWriter, json_logging
from gpuscore.worker.child import run

_PR_SET_PDEATHSIG = 1


def main(factory: str, descriptor: str, parent: str) -> int:
    _die_with(int(parent))
    use_one_arena()
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("gpuscore").setLevel(logging.INFO)
    module, function = factory.split(":")
    # On the server's own standard error, in its format. It may be a pipe that nobody empties, for
    # which nothing here may wait.
    with (
        LogWriter() as log,
        json_logging(log),
        socket.socket(fileno=int(descriptor)) as sock,
    ):
        return run(sock, getattr(import_module(module), function))


def _die_with(parent: int) -> None:
    """On Linux also where this process is too busy to see its socket close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)  # a framework's own ending takes up to seconds, and there is nothing to save
