"""Plain uvicorn with either of its parsers, for comparison."""

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from support.hostile_requests import Attacker, Entry, entries, names, right, shown

PARSERS = ("httptools", "h11")
THREADS = 12  # nearly all of the time is spent waiting
TRIES = 10
QUIET = 1.5  # seconds of silence after which no answer is expected
TESTS = Path(__file__).parent.parent


@contextmanager
def plain_uvicorn(parser: str) -> Iterator[tuple[str, int]]:
    """Start a server of `support.plain_app` and yield its address."""
    command = [sys.executable, "-m", "uvicorn", "support.plain_app:app", "--http", parser]
    options = ["--port", "0", "--ws", "none", "--lifespan", "off", "--no-access-log"]
    process = subprocess.Popen(
        [*command, *options], cwd=TESTS, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        yield "127.0.0.1", _port(process)
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _port(process: "subprocess.Popen[str]") -> int:
    for line in process.stderr or ():
        found = re.search(r"running on http://127\.0\.0\.1:(\d+)", line)
        if found:
            return int(found[1])
    raise RuntimeError(f"uvicorn stopped with {process.wait()}")


def theirs(entry: Entry, address: tuple[str, int]) -> tuple[int, ...]:
    """Return the statuses that uvicorn answers to an entry, until it is quiet."""
    with Attacker(address, entry.bodiless, strict=False) as attacker:
        attacker.perform(entry.steps)
        before = -1
        while before < len(attacker.outcome.answers):
            before = len(attacker.outcome.answers)
            attacker.read(before + 1, QUIET)
        return attacker.outcome.statuses


def as_noted(entry: Entry, parser: str, address: tuple[str, int]) -> tuple[int, ...]:
    """Return what uvicorn answers; where a wrong answer is noted, after up to TRIES times.

    Some wrong answers are races between a request and the connection's end.
    """
    for _ in range(TRIES):
        statuses = theirs(entry, address)
        if shown(statuses) == entry.theirs.get(parser, shown(statuses)):
            break
    return statuses


def differences(parser: str) -> dict[str, str]:
    """Return this uvicorn's wrong answers by entry, as `shown` writes them."""
    every = [(f"{name}: {entry.name}", entry) for name in names() for entry in entries(name)]
    with plain_uvicorn(parser) as address, ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda one: as_noted(one[1], parser, address), every)
        return {
            name: shown(statuses)
            for (name, entry), statuses in zip(every, found, strict=True)
            if not right(entry, statuses)
        }
