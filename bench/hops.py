"""Count the Python calls of a warm request, with Python's profiler.

    python bench/hops.py              # two requests over HTTP, and one through Scorer
    python bench/hops.py --list       # every function of ours, in the order of its first call

Over HTTP only the server's process is counted; through Scorer, text, engine and backend are, in one
process. Calls of C functions are not counted.
"""

import argparse
import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

from gpuscore import Scorer
from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.processes.serving import serve_model

ROOT = Path(__file__).parents[1]
OURS = (str(ROOT / "gpuscore"), str(ROOT / "kernels"))
WARM = 20  # requests before the one that is counted
PATIENCE = 120.0  # seconds until the server is ready
COLORS = ("red", "blue", "green", "black", "white", "grey", "pink", "gold", "teal", "tan")
BODIES = {
    "10 items of token ids": {
        "query": list(range(2, 34)),
        "items": [[40 + n, 50, 60] for n in range(10)],
        "label_token_ids": [3, 4],
    },
    "10 items of text": {
        "query": "query: a red lamp\nitem: ",
        "items": [f"a {color} lamp" for color in COLORS],
        "labels": ["yes", "no"],
    },
}


class Calls:
    """Counts the calls of Python functions in all threads, while told to."""

    def __init__(self) -> None:
        self.counts: Counter[CodeType] = Counter()
        self._counting = False

    def install(self) -> None:
        """Watch this thread and all that are started from now on."""
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)

    def during(self, work: Callable[[], object]) -> Counter[CodeType]:
        self.counts = Counter()
        self._counting = True
        try:
            work()
        finally:
            self._counting = False
        return self.counts

    def _seen(self, frame: FrameType, event: str, _: object) -> None:
        if self._counting and event == "call":
            self.counts[frame.f_code] += 1


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(OURS)


def report(name: str, counts: Counter[CodeType], listed: bool) -> None:
    ours = {code: count for code, count in counts.items() if is_ours(code)}
    files = {code.co_filename for code in ours}
    others = sum(counts.values()) - sum(ours.values())
    print(
        f"{name}: {sum(ours.values())} calls of {len(ours)} functions in {len(files)} files of "
        f"ours, {others} calls of others' Python"
    )
    if listed:
        for code, count in ours.items():
            path = Path(code.co_filename).relative_to(ROOT)
            print(f"  {count:5} {path}:{code.co_firstlineno} {code.co_qualname}")


def over_http(calls: Calls, listed: bool) -> None:
    """Serve the demo model in this thread, and ask for scores in another."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    failures: list[BaseException] = []

    def asks() -> None:
        sys.setprofile(None)  # the client's own calls do not count
        try:
            ask(calls, port, listed)
        except BaseException as error:  # noqa: BLE001  (raised again in the main thread)
            failures.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=asks).start()
    server = ServerConfig(port=port, log_requests=False)
    serve_model(ModelConfig(threads=1), server, RequestLimits(), EngineConfig())
    if failures:
        raise failures[0]


def ask(calls: Calls, port: int, listed: bool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    wait_ready(port)
    for name, body in BODIES.items():
        content = json.dumps(body).encode()
        for _ in range(WARM):
            post(connection, content)
        time.sleep(0.3)  # heartbeats apart, nothing else happens now
        report(f"HTTP, {name}", calls.during(lambda data=content: post(connection, data)), listed)
    connection.close()


def post(connection: http.client.HTTPConnection, content: bytes) -> None:
    connection.request("POST", "/v1/score", content, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    told = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {told[:300]!r}")


def wait_ready(port: int) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        probe = http.client.HTTPConnection("127.0.0.1", port)
        try:
            probe.request("GET", "/ready")
            if probe.getresponse().status == 200:
                return
        except OSError:
            pass  # not bound yet
        finally:
            probe.close()
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready after {PATIENCE:g} seconds")


def through_scorer(calls: Calls, listed: bool) -> None:
    body = BODIES["10 items of text"]
    with Scorer("demo", threads=1) as scorer:

        def score() -> None:
            scorer.score(body["query"], body["items"], labels=body["labels"])

        for _ in range(WARM):
            score()
        report("Scorer, 10 items of text", calls.during(score), listed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print every function of ours")
    listed = parser.parse_args().list
    calls = Calls()
    calls.install()
    over_http(calls, listed)
    through_scorer(calls, listed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
