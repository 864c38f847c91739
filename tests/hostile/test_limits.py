"""Promise: running out of memory fails the request that needed it, not the server.

A real model runs in a real process: the kernel refuses, nothing is simulated.
"""

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from support.connections import canary, connected, large_request
from support.serving import children, serving, wait_until
from support.watched_server import samples_of

JSON = {"content-type": "application/json"}
FLAGS = ("--threads", "1", "--kv-cache-size", "16MiB", "--max-batch-tokens", "16384")
# glibc takes each tensor's memory from the kernel, which can refuse it, not from what was freed.
FROM_KERNEL = {"MALLOC_MMAP_THRESHOLD_": "65536"}
SPARE = 32 * 2**20  # bytes that the engine may take
HALVED = "gpuscore_oom_total", (("outcome", "retried"),)
pytestmark = pytest.mark.hostile


def limit(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + SPARE
    resource.prlimit(pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def test_a_batch_that_the_engine_has_no_memory_for_is_halved(tmp_path):
    body = large_request(20_000, return_label_logprobs=True)
    with (
        serving(
            "demo", *FLAGS, environment=FROM_KERNEL, log=tmp_path / "log", fork=False
        ) as server,
        connected(server) as client,
    ):
        (pid,) = children(server.process.pid)
        said = canary(client)
        right = client.post("/v1/score", content=body, headers=JSON).json()["label_logprobs"]
        limit(pid)
        found = client.post("/v1/score", content=body, headers=JSON).json()["label_logprobs"]
        wait_until(lambda: samples_of(client)[HALVED] >= 1)  # a heartbeat brings it
        assert np.allclose(found, right, rtol=0, atol=2e-4)
        assert canary(client) == said
        assert children(server.process.pid) == [pid]
