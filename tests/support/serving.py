"""A real `gpuscore serve` process on loopback."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from support.programs import ENGINES, STANDBY, Process, start, start_anew

# Flags of servers that start sooner, because they warm up with small batches.
QUICK = ("--threads", "1", "--max-batch-tokens", "512")
# The same for servers that are to compute hardly anything.
SMALL = ("--threads", "1", "--max-batch-tokens", "64")


@dataclass(frozen=True)
class RunningServer:
    url: str
    process: Process

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)


@contextmanager
def serving(
    *arguments: Path | str,
    port: tuple[str, ...] = ("--port", "0"),
    environment: dict[str, str] | None = None,
    wait: bool = True,
    log: Path | None = None,
    fork: bool = True,
    engines: int = 1,
) -> Iterator[RunningServer]:
    """Start a server on a free port and kill it at the end; with `wait` it is ready when yielded.

    Its standard error goes to the file `log`, or else to its standard output. With `fork` it is a
    fork of the fork server, and so are its first `engines`, otherwise a new interpreter.
    """
    errors = subprocess.STDOUT if log is None else log.open("wb")
    process = (start if fork else start_anew)(
        "gpuscore",
        ["serve", *map(str, arguments), *port],
        stdout=subprocess.PIPE,
        stderr=errors,
        env=os.environ | {ENGINES: str(engines)} | (environment or {}),
    )
    try:
        yield RunningServer(_address(process) if wait else "", process)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        if not isinstance(errors, int):
            errors.close()


def _address(process: Process) -> str:
    output = []
    for line in process.stdout or ():
        output.append(line)
        if "ready on" in line:
            return line.split("ready on ")[1].split(" ")[0]
    raise RuntimeError(f"the server stopped with {process.wait()}: {''.join(output)}")


def stops_at_once(server: RunningServer, number: signal.Signals) -> str:
    """Stop a server that has an open connection and no request; return its remaining output."""
    with socket.create_connection(server.address):
        start = time.monotonic()
        server.process.send_signal(number)
        assert server.process.wait(timeout=30) == 0
    assert time.monotonic() - start < 5
    assert server.process.stdout is not None
    return server.process.stdout.read()


def children(pid: int) -> list[int]:
    """Return the process ids of a process's children, but for forks in standby."""
    processes: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError):  # the thread has ended
            processes += map(int, path.read_text().split())
    return [child for child in processes if not _in_standby(child)]


def _in_standby(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == STANDBY
    except FileNotFoundError:  # it has ended
        return True


def running(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except OSError:
        return False


def sockets_of(pid: int) -> set[str]:
    """Return the inodes of a process's sockets, as /proc/net's tables name them."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    return sockets


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline, pause = time.monotonic() + seconds, 0.01
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not true after {seconds} s")
        time.sleep(pause)
        pause = min(1.3 * pause, 0.1)  # a condition may be a request, which takes CPU time


def score(server: RunningServer, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/score", json=body, timeout=60)
