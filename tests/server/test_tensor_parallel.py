"""Promise: a rank that dies ends its replica with one clear line; the server starts it again."""

import os
import signal
import time

import httpx
import pytest

from gpuscore.backends.torch.ranks.messages import BEAT
from support.serving import SMALL, children, running, score, serving, wait_until

BODY = {"query": [1, 2, 3], "items": [[4], [5]], "label_token_ids": [6, 7]}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks") / "log"


@pytest.fixture(scope="module")
def server(tiny_model, log):
    directory, _ = tiny_model("qwen3")
    flags = ("--tensor-parallel", "2", "--device", "cpu", *SMALL)
    with serving(directory, *flags, log=log, engines=3) as started:
        yield started


def engine_and_rank(server):
    (engine,) = children(server.process.pid)
    (rank,) = children(engine)
    return engine, rank


def test_a_rank_that_is_killed_ends_the_replica(server, log):
    before = score(server, **BODY).json()
    engine, rank = engine_and_rank(server)
    os.kill(rank, signal.SIGKILL)
    wait_until(lambda: not running(engine))
    assert not running(rank)
    lines = [line for line in log.read_text().splitlines() if "rank" in line]
    assert len(lines) == 1
    assert f"rank 1 of 2 (process {rank}) ended with signal 9; this replica ends" in lines[0]
    assert "Traceback" not in log.read_text()
    wait_until(lambda: children(server.process.pid) not in ([], [engine]))
    wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, seconds=60)
    assert score(server, **BODY).json()["scores"] == before["scores"]


def test_a_rank_that_is_stopped_ends_the_replica(server, log):
    """There is no request, so nobody waits for the rank, and the probes still tell."""
    _, rank = engine_and_rank(server)
    os.kill(rank, signal.SIGSTOP)
    statuses = {"/health": 200, "/ready": 200}

    def unavailable():
        for path in statuses:
            statuses[path] = httpx.get(server.url + path).status_code
        return set(statuses.values()) == {503}

    wait_until(unavailable, seconds=30)
    assert not running(rank)
    line = [line for line in log.read_text().splitlines() if "rank" in line][-1]
    assert f"rank 1 of 2 (process {rank}) gave no sign of life for 5 seconds" in line


def test_a_rank_ends_with_its_engine(server):
    wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, seconds=60)
    engine, rank = engine_and_rank(server)
    os.kill(engine, signal.SIGSTOP)
    time.sleep(3 * BEAT)  # signs of life that are not read reset the rank's socket
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: not running(rank))
