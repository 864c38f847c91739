"""The price of Ray Serve: the same requests to `gpuscore serve` and to the application of
`gpuscore.ray`, each with one engine on one CPU thread, in turns on one machine.

    .venv-ray/bin/python -P bench/ray_serve.py   # after make test-ray
    RAY_SERVE_ENABLE_HA_PROXY=1 .venv-ray/bin/python -P bench/ray_serve.py

Runs in the environment of `make test-ray`. CPU seconds are the sum over all processes of a server,
the engine and Ray included, without the client.
"""

import argparse
import json
import os
import pickle
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from spent import family

ENGINE = {"device": "cpu", "threads": "1", "max_batch_tokens": "512", "log_requests": "false"}
ITEMS = [f" Item {number} is a city, or it is not." for number in range(10)]


@dataclass(frozen=True)
class Target:
    """A server: the processes below `root`, except those that are not its own."""

    name: str
    url: str
    root: int
    others: frozenset[int] = frozenset()

    def cpu_seconds(self) -> float:
        used = family(self.root).items()
        return sum(sum(times) for pid, times in used if pid not in self.others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=200, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        targets = [stack.enter_context(plain()), stack.enter_context(ray_serve())]
        first, second = (scores(target, "Is it a city?") for target in targets)
        assert np.allclose(first, second, atol=1e-6), "the servers disagree"
        for target in targets:
            run(target, "warm", 50, 4)
        print("threads  server  requests/s  median ms  CPU ms per request")
        for number in range(arguments.rounds):
            for threads in (1, 8):
                for target in targets:
                    seconds, times, cpu = run(
                        target, f"{number} {threads}", arguments.requests, threads
                    )
                    rate, middle = arguments.requests / seconds, 1000 * statistics.median(times)
                    each = 1000 * cpu / arguments.requests
                    row = f"{threads:7}  {target.name:6}  {rate:10.0f}  {middle:9.1f}  {each:.1f}"
                    print(row, flush=True)
    print(sizes())


def run(target: Target, salt: str, requests: int, threads: int) -> tuple[float, list[float], float]:
    """Return the seconds of all requests together, the seconds of each, and the CPU seconds."""
    before, began = target.cpu_seconds(), time.perf_counter()

    def one(number: int) -> float:
        start = time.perf_counter()
        scores(target, f"Run {salt}, query {number}. " + "What is said about cities? " * 10)
        return time.perf_counter() - start

    with ThreadPoolExecutor(threads) as pool:
        times = list(pool.map(one, range(requests)))
    return time.perf_counter() - began, times, target.cpu_seconds() - before


CLIENT = httpx.Client(timeout=60)


def scores(target: Target, query: str) -> list[list[float]]:
    body = {"query": query, "items": ITEMS, "labels": ["yes", "no"]}
    answer = CLIENT.post(f"{target.url}/v1/score", json=body)
    answer.raise_for_status()
    return json.loads(answer.content)["scores"]


@contextmanager
def plain() -> Iterator[Target]:
    flags = ["--device", "cpu", "--threads", "1", "--max-batch-tokens", "512", "--no-log-requests"]
    command = [sys.executable, "-P", "-m", "gpuscore", "serve", "demo", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if "ready on" in line)
        yield Target("serve", ready.split("ready on ")[1].split(" ")[0], process.pid)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def ray_serve() -> Iterator[Target]:
    """Start Ray below this process, which sends the requests, as the other server is."""
    folder, others = tempfile.mkdtemp(prefix="gs-"), frozenset(family())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder})
    import ray
    from ray import serve

    from gpuscore.ray import app

    try:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        serve.start(proxy_location="HeadOnly", http_options={"port": port})
        serve.run(app({"model": "demo", **ENGINE}))
        yield Target("ray", f"http://127.0.0.1:{port}", os.getpid(), others)
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def sizes() -> str:
    """Return the size of a request on its way to an engine, beside its pickled dataclass."""
    from gpuscore.processes.worker.frames import encode
    from gpuscore.ray.messages import ask
    from gpuscore.types.request import ScoreRequest

    labels = np.array([5, 6], np.int32)
    items = tuple(np.arange(50, dtype=np.int32) for _ in range(100))
    query = np.arange(500, dtype=np.int32)
    request = ScoreRequest(query, items, (labels,) * 100, False, deadline=time.monotonic() + 60)
    ours, theirs = len(encode(ask(request, "m"))), len(pickle.dumps(request))
    return f"100 items of 50 tokens after 500: {ours} bytes as a message, {theirs} pickled"


if __name__ == "__main__":
    main()
