"""Workers of pytest-xdist as forks of one process, which has imported the slow packages.

    python -P fork_server.py serve SOCKET     # until its standard input ends
    python -P fork_server.py SOCKET -u -c CODE

xdist starts the second command instead of `python -u -c CODE`: it hands its standard streams to a
fork of the first process, which runs CODE, and ends with that fork. Without it each worker would
spend 8 seconds of a core on imports.
"""

import gc
import os
import select
import socket
import subprocess
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

SHARED = ("support.models", "jax", "gpuscore.cli", "gpuscore.server.run")


class ForkServer:
    """The process that forks workers, as pytest sees it; `command` is the worker's Python, for
    execnet."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = str(Path(self._folder.name, "socket"))
        self.command = f"{sys.executable} -P {__file__} {path}"
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "serve", path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the fork server ended with {self._process.wait()}")

    def close(self) -> None:
        """Wait for the workers, then stop the process."""
        self._process.communicate()
        self._folder.cleanup()


def serve(path: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    for name in SHARED:
        import_module(name)
    gc.freeze()  # a garbage collection in a fork would copy the memory
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
                break
            connection, _ = listener.accept()
            with connection:
                code, streams, *_ = socket.recv_fds(connection, 2**16, 3)
                if os.fork() == 0:
                    listener.close()
                    _work(code.decode(), streams)
                for stream in streams:
                    os.close(stream)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def _work(code: str, streams: list[int]) -> NoReturn:
    """Run the code as `python -u -c` would; the connection stays open until it ends."""
    status = 0
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.argv = ["-c"]
        exec(code, {"__name__": "__main__"})  # noqa: S102
    except BaseException:  # noqa: BLE001  (the process ends here)
        traceback.print_exc()
        status = 1
    os._exit(status)


def launch(path: str, code: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [code.encode()], [0, 1, 2])
        connection.recv(1)  # returns when the fork ends


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        launch(sys.argv[1], sys.argv[-1])
