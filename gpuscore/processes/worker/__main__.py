"""The main program of the engine process, which `gpuscore serve` starts.

    python -P -m gpuscore.processes.worker MODULE:FUNCTION SOCKET PARENT

FUNCTION turns a directory and a `ModelConfig` into a `Prepared`, so the device's framework is
imported in this process only. SOCKET is the number of an inherited socket, PARENT the parent's
process id.
"""

import logging
import os
import socket
import sys
from importlib import import_module

from gpuscore.processes.worker.child import run
from gpuscore.processes.worker.process import die_with, ignore_stops
from gpuscore.system.heap import use_one_arena
from gpuscore.system.log import LogWriter, logging_to


def main(factory: str, descriptor: str, parent: str) -> int:
    ignore_stops()
    die_with(int(parent))
    use_one_arena()
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("gpuscore").setLevel(logging.INFO)
    module, function = factory.split(":")
    # The logs go to the server's standard error. That may be a full pipe that no process reads, so
    # `LogWriter` writes from a thread of its own.
    with (
        LogWriter() as log,
        logging_to(log),
        socket.socket(fileno=int(descriptor)) as sock,
    ):
        return run(sock, getattr(import_module(module), function))


if __name__ == "__main__":
    # A framework's shutdown can take seconds, and there is nothing to save.
    os._exit(main(*sys.argv[1:]))
