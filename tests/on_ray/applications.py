"""Applications on the cluster of the tests, requests to them, and load."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from ray import serve

from nodes import DEVICE, FOLDER

ARGUMENTS = {
    **{"model": "demo", "device": "cpu", "threads": 1, "max_batch_tokens": 512},
    **{"log_requests": False, "max_items": 9000, "max_body_bytes": 3_000_000},
}
ENGINE = {
    "name": "engine",
    "num_replicas": 2,
    "ray_actor_options": {"num_cpus": 0, "resources": {DEVICE: 1}},
}
PATIENCE = 120.0  # seconds; for states that are waited for, never for how fast they come


def wait_until(what: Callable[[], bool], why: str) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, why
        time.sleep(0.2)


Options = dict[str, Any]  # of a deployment, in a Serve config


@dataclass
class Server:
    """An application at an address, and the file with its Serve config, if it has one."""

    url: str
    config: Path = Path()

    def deploy(
        self, engine: Options | None = None, http: Options | None = None, **changed: Any
    ) -> None:
        """Run the application with ARGUMENTS and ENGINE, changed so, as the documentation says, and
        wait until it is ready."""
        deployments = [{**ENGINE, **(engine or {})}, {"name": "http", **(http or {})}]
        application = {"import_path": "gpuscore.ray:app", "args": {**ARGUMENTS, **changed}}
        config = {"applications": [{**application, "deployments": deployments}]}
        self.config.write_text(yaml.safe_dump(config))
        command = [str(Path(sys.executable).with_name("serve")), "run", "--non-blocking"]
        address = ray.get_runtime_context().gcs_address
        subprocess.run([*command, "--address", address, self.config], check=True, timeout=PATIENCE)
        wait_until(lambda: serve.status().applications["default"].status == "RUNNING", "ready")
        self.wait_for_engines(deployments[0]["num_replicas"] or 1)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE, **more)

    def score(self, query: str, items: list[str]) -> httpx.Response:
        return self.post("/v1/score", {"query": query, "items": items, "labels": ["yes", "no"]})

    def metric(self, name: str) -> dict[str, float]:
        """Return a metric of each engine, by replica."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text
        values = re.findall(rf'^{name}{{[^}}]*replica="(\w+)"[^}}]*}} (\S+)$', text, re.MULTILINE)
        return {replica: float(value) for replica, value in values}

    def wait_for_engines(self, number: int) -> None:
        wait_until(lambda: sum(self.metric("gpuscore_replica_up").values()) == number, "engines up")


@dataclass
class Load:
    """Requests in several threads, without pause, until it is stopped."""

    server: Server
    statuses: Counter[int] = field(default_factory=Counter)
    bodies: set[str] = field(default_factory=set)  # of errors
    wrong: int = 0
    slowest: float = 0.0

    def run(self, number: int, stopped: threading.Event, items: int, timeout: int) -> None:
        turn = 0
        with httpx.Client(timeout=PATIENCE) as client:
            while not stopped.is_set():
                turn += 1
                body = {
                    "query": f"Thread {number}, turn {turn}. " + "What is said about cities? " * 20,
                    "items": [f" Item {item} is a city." for item in range(items)],
                    "labels": ["yes", "no"],
                }
                began = time.monotonic()
                answer = client.post(
                    f"{self.server.url}/v1/score",
                    json=body,
                    headers={"X-Request-Timeout-Ms": str(1000 * timeout)},
                )
                self.slowest = max(self.slowest, time.monotonic() - began)
                self.statuses[answer.status_code] += 1
                if answer.status_code != 200:
                    self.bodies.add(answer.text)
                elif len(answer.json()["scores"]) != items:
                    self.wrong += 1

    @property
    def answered(self) -> int:
        return self.statuses[200]


@contextmanager
def load(server: Server, threads: int = 4, items: int = 3, timeout: int = 60) -> Iterator[Load]:
    """Send requests until the end of the block."""
    running, stopped = Load(server), threading.Event()
    workers = [
        threading.Thread(target=running.run, args=(number, stopped, items, timeout))
        for number in range(threads)
    ]
    for worker in workers:
        worker.start()
    try:
        yield running
    finally:
        stopped.set()
        for worker in workers:
            worker.join()


def kill_an_engine() -> None:
    """Kill the process of one of the engines, as a fault of its device would."""
    _kill(lambda command: b"gpuscore.processes.worker" in command.split(b"\0"))


def kill_a_replica() -> None:
    """Kill the process of Ray's that started one of the engines."""
    _kill(lambda command: b"ServeReplica:default:engine" in command)


def kill_an_actor() -> None:
    """Kill the process of an actor that scores the rows of a pipeline."""
    _kill(lambda command: b"ScoreBatches" in command)


def kill_an_http_process() -> None:
    """Kill one of the processes that answer HTTP."""
    _kill(lambda command: b"ServeReplica:default:http" in command)


def _kill(meant: Callable[[bytes], bool]) -> None:
    mark = f"RAY_TMPDIR={FOLDER}".encode()  # of this cluster alone
    for process in sorted(Path("/proc").glob("[0-9]*")):
        try:
            command = (process / "cmdline").read_bytes()
            own = mark in (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or is another user's
        if own and meant(command):
            os.kill(int(process.name), signal.SIGKILL)
            return
    raise AssertionError("there is no such process")
