"""One process that has imported the slow packages, and forks what the tests ask for: the workers of
pytest-xdist, and programs of gpuscore (`support.programs`).

    python -P fork_server.py serve SOCKET MODULES  # until its standard input ends
    python -P fork_server.py SOCKET -u -c CODE     # a worker

xdist starts the second command instead of `python -u -c CODE`: it hands its standard streams to a
fork of the first process, which runs CODE, and ends with that fork. Without it each worker would
spend 8 seconds of a core on imports, and each server with its engine 4.

The process only imports, so it has one thread, which is what makes a fork safe; a check before each
fork says so. Threads of torch begin in the forks.
"""

import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

VARIABLE = "TESTS_FORK_SERVER"  # the socket's path, in the environment of the forks
PROGRAMS = (
    "support.forked_program,gpuscore.commands.cli,gpuscore.server.run,gpuscore.processes.worker.child,"
    "gpuscore.commands.bulk.command,gpuscore.backends.torch.backend,numpy.random,numpy.ma"
)
WORKERS = f"support.models,gpuscore.backends.jax.backend,gpuscore.client,{PROGRAMS}"


class ForkServer:
    """The process that forks, as pytest sees it.

    Attributes:
        path: of its socket.
        command: the Python of a worker, for execnet.
    """

    def __init__(self, modules: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self._folder.name, "socket"))
        self.command = f"{sys.executable} -P {__file__} {self.path}"
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "serve", self.path, modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the fork server ended with {self._process.wait()}")

    def close(self) -> None:
        """Wait for the workers, then stop the process."""
        self._process.communicate()
        self._folder.cleanup()


class _Server:
    """The loop of the process: accepts requests, forks, and reports how each fork ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._forks: dict[int, tuple[int, socket.socket]] = {}  # by process id
        self._listener = listener
        self._selector = selectors.PollSelector()  # no descriptor of its own to close in a fork
        self._selector.register(sys.stdin, selectors.EVENT_READ, self._stop_listening)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                if self._selector.get_map().get(key.fd) is key:  # not removed by an earlier one
                    key.data()

    def _stop_listening(self) -> None:
        self._selector.unregister(sys.stdin)
        self._selector.unregister(self._listener)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        streams = socket.recv_fds(connection, 1, 3)[1]
        with connection.makefile() as file:
            request = json.loads(file.readline())
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"{len(threads)} threads: a fork would be unsafe"
        if (pid := os.fork()) == 0:
            self._leave(connection)
            _run(request, streams)
        for stream in streams:
            os.close(stream)
        self._watch(pid, connection)

    def _leave(self, connection: socket.socket) -> None:
        """Close, in a fork, what belongs to this process."""
        for pidfd, other in self._forks.values():
            os.close(pidfd)
            other.close()
        self._listener.close()
        connection.close()

    def _watch(self, pid: int, connection: socket.socket) -> None:
        self._forks[pid] = os.pidfd_open(pid), connection
        self._selector.register(
            self._forks[pid][0], selectors.EVENT_READ, lambda: self._report(pid)
        )
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._abandon(pid))
        _tell(connection, pid)

    def _abandon(self, pid: int) -> None:
        """End a fork whose user has gone, as by the end of a test that failed in the middle."""
        self._selector.unregister(self._forks[pid][1])
        os.kill(pid, signal.SIGKILL)

    def _report(self, pid: int) -> None:
        pidfd, connection = self._forks.pop(pid)
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(pidfd)
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        os.close(pidfd)
        with connection:
            _tell(connection, os.waitstatus_to_exitcode(status))


def _tell(connection: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it
        connection.sendall(f"{number}\n".encode())


def serve(path: str, modules: str) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy starts the others when it is imported
    gc.disable()
    for name in modules.split(","):
        import_module(name)
    gc.enable()
    gc.freeze()  # a garbage collection in a fork would copy the memory
    del os.environ["OPENBLAS_NUM_THREADS"]
    os.environ[VARIABLE] = path
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        _Server(listener).run()


def _run(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """Take the streams and run what is asked for; its exit code becomes the fork's."""
    status = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        if "code" in request:
            status = _work(request["code"])
        else:
            from support.forked_program import run_program

            status = run_program(**request)
    except BaseException:  # noqa: BLE001  (the process ends here)
        traceback.print_exc()
    os._exit(status)


def _work(code: str) -> int:
    """Run the code as `python -u -c` would."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = ["-c"]
    exec(code, {"__name__": "__main__"})  # noqa: S102
    return 0


def ask(path: str, request: dict[str, Any], streams: list[int]) -> tuple[int, socket.socket]:
    """Have a process forked that runs with these standard streams.

    Returns:
        Its process id, and a connection: the exit code follows there, and closing it kills the
        process.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    socket.send_fds(connection, [b" "], streams)
    connection.sendall(json.dumps(request).encode() + b"\n")
    pid = b""
    while not pid.endswith(b"\n"):  # byte by byte: the exit code may be there already
        if not (byte := connection.recv(1)):
            raise RuntimeError("the fork server has ended")
        pid += byte
    return int(pid), connection


def launch(path: str, code: str) -> int:
    _, connection = ask(path, {"code": code}, [0, 1, 2])
    with connection, connection.makefile() as file:
        return abs(int(file.readline()))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        sys.exit(launch(sys.argv[1], sys.argv[-1]))
