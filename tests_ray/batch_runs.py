"""Runs of `gpuscore batch` as processes, and the processes of a node's actors."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

QUICK = ("--threads", "1", "--max-batch-tokens", "512")
SECONDS = 120.0  # for anything that is waited for

Run = subprocess.Popen[str]


def make_rows(count: int, queries: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return rows whose queries come in no order."""
    choose = random.Random(seed)
    words = ("blue", "red", "wool", "lamp", "chair", "naïve ☃", "steel")
    return [
        {
            "id": number,
            "query": f"a {choose.choice(words)} {choose.randrange(queries)}",
            "item": f"A {choose.choice(words)} scarf, {choose.randrange(1000)}.",
        }
        for number in range(count)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def words(source: Path, output: Path, *more: str, model: str = "demo") -> list[str]:
    """Return the words of a job with labels."""
    named = ["--input", str(source), "--output", str(output), "--query-column", "query"]
    return ["batch", model, *named, "--labels", "yes,no", *QUICK, *more]


@contextmanager
def running(arguments: list[str], env: Mapping[str, str] | None = None) -> Iterator[Run]:
    """Start a run; kill it at the end."""
    command = [sys.executable, "-P", "-m", "gpuscore", *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        cwd=Path(arguments[arguments.index("--output") + 1]).parent,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run(arguments: list[str], env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run to the end; return the exit code and what was printed on standard error."""
    with running(arguments, env) as process:
        _, told = process.communicate(timeout=SECONDS)
        return process.returncode, told


def until(what: Callable[[], Any], process: Run | None = None) -> Any:
    """Wait until something is true and return it; fail if the process ends before."""
    end = time.monotonic() + SECONDS
    while not (result := what()):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)
    return result


def done(output: Path) -> set[str]:
    """Return the names of the groups that a job has done."""
    folder = output.with_name(f"{output.name}.work") / "groups"
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def descendants(pid: int) -> list[int]:
    """Return the processes below one, children before grandchildren."""
    children = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, path.read_text().split())
    return children + [grandchild for child in children for grandchild in descendants(child)]


def title(pid: int) -> str:
    """Return a process's command line; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def processes_of(nodes: list[Any]) -> dict[str, list[int]]:
    """Return the actors' and the engines' processes on these nodes."""
    below = [process for node in nodes for pid in _raylets(node) for process in descendants(pid)]
    return {
        "actors": [pid for pid in below if "GroupScorer" in title(pid)],
        "engines": [pid for pid in below if " gpuscore.processes.worker " in title(pid)],
    }


def _raylets(node: Any) -> list[int]:
    return [raylet.process.pid for raylet in node.all_processes.get("raylet", [])]
