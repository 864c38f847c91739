"""A program of gpuscore in a fork of the fork server, where nothing is left to import.

Everything happens as after a start with `python -P -m MODULE` but for the interpreter's own start
and end: the program's main module runs, with its arguments, streams, environment and directory. Its
engines' processes are children of the program's, too, with their own streams, environment and
signals, and so are the other ranks of an engine.
"""

import fcntl
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from gpuscore.backends.torch.ranks import peers
from gpuscore.processes.worker import process as worker_process
from support.programs import ENGINES, STANDBY

MOST = 3  # descriptors of an engine: standard input and output, its socket


def run_program(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    session: bool,
) -> int:
    """Run a main module in this process, a fork; return its exit code."""
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _output(1, "strict", not environment.get("PYTHONUNBUFFERED"))
    sys.stderr = sys.__stderr__ = _output(2, "backslashreplace", buffered=False)
    ranks = int("--tensor-parallel" in arguments)
    worker_process.Popen = Standbys(int(environment.get(ENGINES, "1")), ranks).start
    code = _run(module, arguments)
    sys.stdout.flush()
    return code


def _output(number: int, errors: str, buffered: bool) -> io.TextIOWrapper:
    stream = open(number, "wb", buffering=-1 if buffered else 0, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(stream, "utf-8", errors, write_through=not buffered)


def _run(module: str, arguments: Sequence[str]) -> int:
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return int(ended.code or 0)  # a text fails: no program of ours ends with one
    except BaseException:  # noqa: BLE001  (as the interpreter does)
        traceback.print_exc()
        return 1
    return 0


class StandbyProcess:
    """A fork of a process before it has threads, which waits to become its engine or a rank.

    `wait`, `kill`, `pid` and `returncode` work as a `Popen`'s. Until it starts, /proc names it
    STANDBY.
    """

    def __init__(self, ranks: int = 0) -> None:
        self.returncode: int | None = None
        self._socket, theirs = socket.socketpair()
        name = _rename(STANDBY)
        self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            _stand_by(theirs, name, ranks)
        _rename(name)
        theirs.close()

    def start(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int | IO[Any],
        pass_fds: Sequence[int],
        env: Mapping[str, str],
    ) -> None:
        assert (command[:3], stdin) == ([sys.executable, "-P", "-m"], subprocess.DEVNULL)
        with self._socket, open(os.devnull, "r+b") as null:
            output = null.fileno() if stdout == subprocess.DEVNULL else stdout
            socket.send_fds(self._socket, [b" "], [null.fileno(), output, *pass_fds])
            request = {"command": command[3:], "environment": dict(env), "numbers": pass_fds}
            self._socket.sendall(json.dumps(request).encode())
            self._socket.shutdown(socket.SHUT_WR)  # forks of the program hold it open as well

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            else:
                time.sleep(0.005)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class Standbys:
    """Some processes in standby, each with some ranks of its own in standby.

    `start` takes the place of `Popen`, which starts later ones.
    """

    def __init__(self, count: int, ranks: int = 0) -> None:
        self._standing = [StandbyProcess(ranks) for _ in range(count)]

    def start(
        self, command: Sequence[str], **streams: Any
    ) -> "StandbyProcess | subprocess.Popen[bytes]":
        if not self._standing:
            return subprocess.Popen(command, **streams)
        process = self._standing.pop(0)
        streams.pop("start_new_session", None)  # it leads one already
        process.start(command, **streams)
        return process


def _move(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors these numbers."""
    above = max(*descriptors, *numbers) + 1  # so that none is overwritten before it has moved
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)


def _stand_by(connection: socket.socket, name: str, ranks: int) -> NoReturn:
    """Wait for `StandbyProcess.start`, or for the end of the program."""
    os.setsid()
    status = 1
    try:
        with connection, connection.makefile("rb") as file:
            streams = socket.recv_fds(connection, 1, MOST)[1]
            request = json.loads(file.read() or "null")
        if request is None:
            os._exit(0)
        _rename(name)
        _move(streams, [0, 1, *request["numbers"]])
        os.environ.clear()
        os.environ.update(request["environment"])
        if ranks:
            peers.Popen = Standbys(ranks).start
        module, *arguments = request["command"]
        status = _run(module, arguments)  # ends the process itself
    except BaseException:  # noqa: BLE001  (the process ends here)
        traceback.print_exc()
    os._exit(status)


def _rename(name: str) -> str:
    """Change this process's name in /proc; return its old one."""
    path = Path("/proc/self/comm")
    old = path.read_text()
    path.write_text(name)
    return old
