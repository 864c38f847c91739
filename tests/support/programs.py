"""Programs of gpuscore as processes that have nothing left to import: forks of the fork server."""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from support import fork_server

COMMAND = str(Path(sys.executable).with_name("gpuscore"))
STANDBY = "standby"  # the name in /proc of a fork that waits to become an engine
ENGINES = "TESTS_ENGINES"  # a variable: how many engines a program finds in standby, by default 1
Stream = int | IO[Any]


class ForkedProgram:
    """A program in a fork, whose start takes less than a tenth of a new interpreter's CPU time.

    The arguments and methods are `subprocess.Popen`'s with text streams. The interpreter's own
    start and end are left out; a test of either starts COMMAND.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        stdout: Stream,
        stderr: Stream,
        env: Mapping[str, str] = os.environ,
        session: bool = False,
    ) -> None:
        self.args = ["-m", module, *arguments]
        self.returncode: int | None = None
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(env),
            "folder": os.getcwd(),
            "session": session,
        }
        self.stdout, output = _stream(stdout)
        self.stderr, errors = (None, output) if stderr == subprocess.STDOUT else _stream(stderr)
        with open(os.devnull, "rb") as null:
            streams = [null.fileno(), output, errors]
            self.pid, self.connection = fork_server.ask(_path(), request, streams)
        for reader, end in ((self.stdout, output), (self.stderr, errors)):
            if reader is not None:  # a pipe, whose other end only the program keeps
                os.close(end)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.connection.settimeout(timeout)
            try:
                code = self.connection.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self.connection.close()
            self.returncode = int(code)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> "ForkedProgram":
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.wait()


def _stream(stream: Stream) -> tuple[IO[str] | None, int]:
    """Return the reader of a pipe, if one is asked for, and the program's descriptor."""
    if stream != subprocess.PIPE:
        return None, stream if isinstance(stream, int) else stream.fileno()
    reading, writing = os.pipe()
    return open(reading, encoding="utf-8"), writing


@cache
def _path() -> str:
    """Return the fork server's socket: of `make test`, or of a server for this process only."""
    if path := os.environ.get(fork_server.VARIABLE):
        return path
    server = fork_server.ForkServer(fork_server.PROGRAMS)
    atexit.register(server.close)
    return server.path


Process = ForkedProgram | subprocess.Popen[str]


def start(
    module: str,
    arguments: Sequence[str],
    *,
    stdout: Stream,
    stderr: Stream,
    env: Mapping[str, str] = os.environ,
    session: bool = False,
) -> Process:
    """Start `python -P -m module`, on Linux as a fork; standard input is empty.

    With `session` it leads a new session and process group.
    """
    new = ForkedProgram if sys.platform == "linux" else start_anew
    return new(module, arguments, stdout=stdout, stderr=stderr, env=env, session=session)


def start_anew(
    module: str,
    arguments: Sequence[str],
    *,
    stdout: Stream,
    stderr: Stream,
    env: Mapping[str, str] = os.environ,
    session: bool = False,
) -> "subprocess.Popen[str]":
    """Start `python -P -m module` in a new interpreter, as users do; standard input is empty."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=env,
        text=True,
        start_new_session=session,
    )


@contextmanager
def started(*arguments: object, module: str = "gpuscore") -> Iterator[Process]:
    """Start a command of gpuscore, whose output is dropped; it is killed at the end."""
    with open(os.devnull, "wb") as null:
        process = start(module, [str(argument) for argument in arguments], stdout=null, stderr=null)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def run(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of gpuscore to its end, with these variables added to the environment."""
    return run_module("gpuscore", *arguments, **environment)


def run_module(
    module: str, *arguments: object, seconds: float = 120.0, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run a main module to its end, for at most some seconds; on Linux in a fork, as `run` does."""
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = start(module, words, stdout=output, stderr=errors, env=os.environ | environment)
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(words, code, output.read(), errors.read())
