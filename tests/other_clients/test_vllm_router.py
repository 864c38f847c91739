"""Promise: vLLM's router (vllm-router on PyPI) spreads scores over two servers with keys, and
passes their models and errors on."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asked import DOCUMENTS, QUERY
from conftest import Server

ROUTER = str(Path(sys.executable).with_name("vllm-router"))
BODY = {"text_1": QUERY, "text_2": DOCUMENTS}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextmanager
def routing(workers: list[str], key: str, policy: str, log: Path) -> Iterator[Server]:
    """Start a router, which sends the key to the servers."""
    port, metrics = free_port(), free_port()
    command = [ROUTER, "--worker-urls", *workers, "--policy", policy, "--api-key", key]
    command += ["--port", str(port), "--prometheus-port", str(metrics)]
    with log.open("wb") as output:
        router = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        server = Server(f"http://127.0.0.1:{port}", key)
        deadline = time.monotonic() + 60
        while not is_healthy(server):
            assert time.monotonic() < deadline, log.read_text()
            assert router.poll() is None, log.read_text()
            time.sleep(0.1)
        yield server
    finally:
        router.terminate()
        router.wait()


def is_healthy(server: Server) -> bool:
    try:
        with urllib.request.urlopen(server.url + "/health", timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


def scored(server: Server) -> int:
    """Return the scoring requests that a server has answered."""
    request = urllib.request.Request(
        server.url + "/metrics", headers={"Authorization": f"Bearer {server.key}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    wanted = [line for line in lines if line.startswith("gpuscore_requests_total{")]
    return sum(
        int(float(line.split()[-1]))
        for line in wanted
        if 'route="/v1/score"' in line and 'status="200"' in line
    )


@pytest.fixture(scope="module")
def servers(server: Server) -> list[Server]:
    return [server, Server(os.environ["OTHER_URL"], server.key)]


@pytest.mark.parametrize("policy", ["round_robin", "power_of_two", "random"])
def test_scores_are_spread_over_two_servers(servers, tmp_path, policy):
    before = [scored(server) for server in servers]
    expected = servers[0].post("/v1/score", BODY)["data"]
    urls = [server.url for server in servers]
    with routing(urls, servers[0].key, policy, tmp_path / "log") as router:
        for _ in range(40):
            for got, entry in zip(router.post("/v1/score", BODY)["data"], expected, strict=True):
                assert got == entry | {"score": pytest.approx(entry["score"], abs=1e-5)}
    first, second = (scored(server) - old for server, old in zip(servers, before, strict=True))
    assert first + second == 41
    assert min(first, second) >= 5


def test_models_and_errors_pass_through(servers, tmp_path):
    urls = [server.url for server in servers]
    with routing(urls, servers[0].key, "round_robin", tmp_path / "log") as router:
        request = urllib.request.Request(
            router.url + "/v1/models", headers={"Authorization": f"Bearer {router.key}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert [card["id"] for card in json.load(answer)["data"]] == ["demo"]
        with pytest.raises(urllib.error.HTTPError) as caught:
            router.post("/v1/score", BODY | {"text_2": 5})
        assert caught.value.code == 400
        assert json.load(caught.value)["error"]["code"] == "invalid_request"
