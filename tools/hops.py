"""Count the Python calls of a warm `/v1/score` of ten texts, in all processes of a server.

    python -P tools/hops.py
    python -P tools/hops.py --list     # also every function of ours, in the order of its first call

A module that every started Python process imports first sets Python's profiler; while a request is
counted, it writes a line for each call. Calls of C functions are not counted, nor what threads do
that C code starts. The last line says which number of our files a request of ten texts enters.
"""

import argparse
import http.client
import json
import mmap
import operator
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = (str(ROOT / "gpuscore") + "/", str(ROOT / "kernels") + "/")
WARM = 20  # requests before the request that is counted
TIMES = 3  # that the counted request is made
MORE = 0.1  # seconds; a request takes less
QUIET = 0.3  # seconds before and after the counted request
COLORS = ("red", "blue", "green", "black", "white", "grey", "pink", "gold", "teal", "tan")
TEXTS = {
    "query": "query: a red lamp\nitem: ",
    "items": [f"a {color} lamp" for color in COLORS],
    "labels": ["yes", "no"],
}

# `sitecustomize`, which Python imports before a program: a byte that processes share says whether
# calls count now.
WATCH = """
import mmap, os, sys, threading

_folder = os.path.dirname(__file__)
with open(os.path.join(_folder, "on"), "r+b") as _file:
    _on = mmap.mmap(_file.fileno(), 1)
_calls = os.open(os.path.join(_folder, "calls"), os.O_WRONLY | os.O_APPEND)

def _seen(frame, event, _):
    if event == "call" and _on[0]:
        code = frame.f_code
        at = (os.getpid(), code.co_filename, code.co_firstlineno, code.co_qualname)
        os.write(_calls, ("\\t".join(map(str, at)) + "\\n").encode())

threading.setprofile(_seen)
sys.setprofile(_seen)
"""
Function = tuple[int, str, int, str]  # a process, a file, a line and a name


class Calls:
    """Calls of Python functions in all processes that are started with `environment`."""

    def __init__(self, folder: Path) -> None:
        (folder / "sitecustomize.py").write_text(WATCH)
        (folder / "on").write_bytes(b"\0")
        self._path = folder / "calls"
        self._path.touch()
        with (folder / "on").open("r+b") as file:
            self._on = mmap.mmap(file.fileno(), 1)
        self.environment = os.environ | {"PYTHONPATH": str(folder)}

    def during(self, work: Callable[[], object]) -> Counter[Function]:
        """Count the calls while `work` runs, those after an answer was sent included.

        What processes call by the clock, such as heartbeats, is taken off: as many calls as they
        make in a little more time without work, and what is not called each time.
        """
        for _ in range(WARM):
            work()
        counts = [
            self._counted(work) - self._counted(partial(time.sleep, MORE)) for _ in range(TIMES)
        ]
        return reduce(operator.and_, counts)

    def _counted(self, work: Callable[[], object]) -> Counter[Function]:
        time.sleep(QUIET)
        os.truncate(self._path, 0)
        self._on[0] = 1
        work()
        time.sleep(QUIET)
        self._on[0] = 0
        counts: Counter[Function] = Counter()
        for line in self._path.read_text().splitlines():
            process, file, number, name = line.split("\t")
            counts[int(process), file, int(number), name] += 1
        return counts


def report(name: str, counts: Counter[Function], listed: bool) -> int:
    """Print the counts; return the number of our files in which functions were entered."""
    ours = {function: count for function, count in counts.items() if function[1].startswith(OURS)}
    processes, files = ({function[part] for function in ours} for part in (0, 1))
    print(
        f"{name}: {sum(ours.values())} calls of {len({f[1:] for f in ours})} functions in "
        f"{len(files)} files of ours and {len(processes)} processes, "
        f"{counts.total() - sum(ours.values())} calls of others' Python"
    )
    if listed:
        for (process, file, line, function), count in ours.items():
            print(f"  {process} {count:5} {Path(file).relative_to(ROOT)}:{line} {function}")
    return len(files)


def over_http(calls: Calls, listed: bool) -> int:
    """Ask `gpuscore serve demo` for scores; return the number of files that this enters."""
    command = [sys.executable, "-P", "-m", "gpuscore", "serve", "demo", "--port", "0"]
    options = ["--threads", "1", "--device", "cpu", "--no-log-requests"]
    server = subprocess.Popen(
        [*command, *options], env=calls.environment, stdout=subprocess.PIPE, text=True
    )
    try:
        ready = next(line for line in server.stdout or () if "ready on http://" in line)
        connection = http.client.HTTPConnection(ready.split("http://")[1].split()[0].strip("/"))
        content = json.dumps(TEXTS).encode()
        counts = calls.during(lambda: post(connection, content))
        connection.close()
        return report("HTTP, ten texts", counts, listed)
    finally:
        server.terminate()
        server.wait()


def post(connection: http.client.HTTPConnection, content: bytes) -> None:
    connection.request("POST", "/v1/score", content, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    told = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {told[:300]!r}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print every function of ours")
    listed = parser.parse_args().list
    with tempfile.TemporaryDirectory() as folder:
        entered = over_http(Calls(Path(folder)), listed)
    print(f"files entered by a warm /v1/score of ten texts, all processes: {entered}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
