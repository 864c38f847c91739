"""Servers of /v1/systemone for `bench/decisions.py`, each a process of its own."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from vllm_setup import vllm_setup

SCRATCH = Path(__file__).parents[1] / "scratch"
MOST_OF_VLLM = 64  # questions of a request
START = 900  # seconds


@dataclass(frozen=True)
class Server:
    """A server of /v1/systemone.

    Args:
        name: in the table.
        client: of its address.
        model: its name.
        most: questions of a request; more are asked by several requests at once.
    """

    name: str
    client: httpx.Client
    model: str
    most: int

    def ask(self, state: str, questions: dict[str, Any]) -> int:
        """Ask all questions; return the input tokens that the server counted."""
        names = list(questions)
        parts = [names[i : i + self.most] for i in range(0, len(names), self.most)]
        bodies = [
            {"model": self.model, "state": state, "questions": {n: questions[n] for n in part}}
            for part in parts
        ]
        with ThreadPoolExecutor(len(bodies)) as pool:
            return sum(pool.map(self._one, bodies))

    def _one(self, body: dict[str, Any]) -> int:
        reply = self.client.post("/v1/systemone", json=body)
        if reply.status_code != 200:
            raise RuntimeError(f"{self.name}: {reply.status_code} {reply.text[:500]}")
        found = reply.json()
        if set(found["answers"]) != set(body["questions"]):
            raise RuntimeError(f"{self.name} did not answer all questions")
        shares = [answer["noul"] for answer in found["answers"].values()]
        if not all(0 <= share <= 1 for share in shares):
            raise RuntimeError(f"{self.name} gave {shares[:3]}")
        return int(found["usage"]["input_tokens"])


@contextmanager
def gpuscore_server(directory: Path, threads: int) -> Iterator[Server]:
    command = [
        str(Path(sys.executable).with_name("gpuscore")),
        "serve",
        str(directory),
        "--dtype",
        "float32",
    ]
    command += ["--threads", str(threads), "--request-timeout=3600", "--max-queue-seconds=3600"]
    with running("gpuscore", command, os.environ, directory.name, 10**9) as server:
        yield server


@contextmanager
def vllm_server(python: Path, directory: Path, threads: int) -> Iterator[Server]:
    setup = vllm_setup(python, threads)
    print(setup.about, flush=True)
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(directory), "--served-model-name", directory.name]
    command += ["--dtype", "float32", "--max-model-len", "4096"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2"} | setup.environment
    with running("vLLM", command, environment, directory.name, MOST_OF_VLLM) as server:
        yield server


@contextmanager
def running(
    name: str, command: Sequence[str], environment: Any, model: str, most: int
) -> Iterator[Server]:
    """Start a server on a free port, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    SCRATCH.mkdir(exist_ok=True)
    log = SCRATCH / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--host", "127.0.0.1"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=SCRATCH,  # where no folder looks like a package
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=3600) as client:
            _wait(name, client, process, log)
            yield Server(name, client, model, most)
    finally:
        process.terminate()
        process.wait()


def _wait(name: str, client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START
    path = "/ready" if name == "gpuscore" else "/health"
    while True:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{name} did not start; see {log}")
        try:
            if client.get(path, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
