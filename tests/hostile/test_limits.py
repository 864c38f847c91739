"""Promise: running out of memory fails the request that needed it, not the server.

A real model runs in a real process: the kernel refuses, nothing is simulated.
"""

import json
import os
import resource
from pathlib import Path

import pytest

from support.connections import canary, connected, large_request
from support.serving import children, serving, wait_until
from support.watched_server import samples_of

MIB = 2**20
JSON = {"content-type": "application/json"}
FLAGS = ("--threads", "1", "--kv-cache-size", "16MiB")
# glibc takes each tensor's memory from the kernel, which can refuse it, not from what was freed.
FROM_KERNEL = {"MALLOC_MMAP_THRESHOLD_": "65536"}
pytestmark = pytest.mark.hostile


def ask(client, body):
    return client.post("/v1/score", content=body, headers=JSON)


def address_space(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def limit(pid, spare):
    """Let a process take at most `spare` more bytes of memory than now; None removes the limit."""
    most = resource.RLIM_INFINITY if spare is None else address_space(pid) + spare
    resource.prlimit(pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def scores(reply):
    assert reply.status_code == 200, reply.text
    return json.loads(reply.content)["scores"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    log = tmp_path_factory.mktemp("limits") / "log"
    with (
        serving(
            "demo",
            *FLAGS,
            "--max-batch-tokens",
            "16384",
            environment=FROM_KERNEL,
            log=log,
            fork=False,
        ) as server,
        connected(server) as client,
    ):
        yield server, client


def test_a_batch_that_the_engine_has_no_memory_for_is_halved(served):
    server, client = served
    (pid,) = children(server.process.pid)
    said, body = canary(client), large_request(20_000, return_label_logprobs=True)
    right = json.loads(ask(client, body).content)["label_logprobs"]
    limit(pid, 32 * MIB)
    try:
        logprobs = json.loads(ask(client, body).content)["label_logprobs"]
    finally:
        limit(pid, None)
    wait_until(lambda: metric_of(client, "retried") >= 1)  # a heartbeat brings it
    for (before,), (other,) in zip(right, logprobs, strict=True):
        assert before == pytest.approx(other, abs=2e-4)
    assert canary(client) == said
    assert children(server.process.pid) == [pid]


def metric_of(client, outcome):
    return samples_of(client)["gpuscore_oom_total", (("outcome", outcome),)]
