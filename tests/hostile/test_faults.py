"""Promise: whatever happens to the engine, the streams or the server itself, each of 1,024 requests
in flight gets exactly one answer: the right scores, or an error of the contract. A clock that jumps
changes timestamps only, and without memory for a batch the engine halves it.

Seeded: SEED=... in the environment gives another schedule; failures name it.
"""

import asyncio
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from support.connections import (
    Connection,
    canary,
    check_error,
    connected,
    large_request,
    retry_after,
    under_way,
)
from support.many_callers import Crowd
from support.serving import children, running, serving, wait_until
from support.tape_engine import HELD
from support.tape_servers import JSON, body_of, engine_of, in_flight, let_go, tape_server
from support.vitals import GROWTH, MIB, SETTLE, vitals
from support.watched_server import samples_of

SEED = int(os.environ.get("SEED", "14"))
SECONDS = 20.0  # of injected faults
PATIENCE = {"delay": 0.3, "stopped": 2.5, "forgiven": 0}
SERVER = {"max_inflight_per_key": 4096, "log_requests": True}
DAY = 86400
JUMPS = (DAY, 0, -DAY, 3600, 20 * 365 * DAY, -1, 0)  # seconds from the true time
SPARE = 32 * MIB  # that an engine may take of the kernel
pytestmark = pytest.mark.hostile


def known(client):
    """Return requests of up to nine items, with their scores on a healthy server."""
    rng, scored = random.Random(SEED), []
    for _ in range(64):
        items = [rng.choices(range(1, 800), k=rng.randint(1, 40)) for _ in range(rng.randint(1, 9))]
        query = rng.choices(range(1, 800), k=rng.randint(0, 60))
        body = json.dumps({"query": query, "items": items, "label_token_ids": [3, 5]}).encode()
        reply = client.post("/v1/score", content=body, headers=JSON)
        assert reply.status_code == 200, reply.text
        scored.append((body, reply.json()["scores"]))
    return scored


def check(outcome, broken=0):
    assert not outcome.wrong, f"SEED={SEED}: {outcome.wrong[:5]} of {outcome}"
    assert outcome.broken <= broken, f"SEED={SEED}: {outcome}"


def at_rest(server):
    """Return the vitals of the server's own process; the tape in its child keeps every batch.

    The client's connection is one of its descriptors until the server closes it, after 5 idle
    seconds.
    """
    time.sleep(SETTLE + 1)
    return vitals(server.process.pid)


async def harm(server, rng):
    """Inject one fault into the engine's process, if there is one."""
    pids = children(server.process.pid)
    if not pids:
        return
    with suppress(ProcessLookupError):  # the server may just have replaced it
        kind = rng.choice(("kill", "pause", "stop", "terminate"))
        number = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}.get(kind, signal.SIGSTOP)
        os.kill(pids[0], number)
        if number == signal.SIGSTOP:
            await asyncio.sleep(1.0 if kind == "pause" else 4.0)
            os.kill(pids[0], signal.SIGCONT)


def test_a_thousand_requests_while_the_engine_is_harmed():
    """Standard error is first a pipe that nobody reads, then one without a reader."""
    with tape_server(PATIENCE, server=SERVER, fork=False) as (server, client):
        requests, rng = known(client), random.Random(SEED)
        said = canary(client)

        async def attack(seconds, closes=math.inf):
            start = time.monotonic()
            async with Crowd(server.address, requests) as crowd:
                await crowd.until(2000)
                while time.monotonic() < start + seconds:
                    await harm(server, rng)
                    await asyncio.sleep(rng.uniform(0, 2))
                    if time.monotonic() > start + closes:
                        server.process.stderr.close()
                        closes = math.inf
                await crowd.until(2000)
            return crowd.outcome

        # Memory of a first crowd and of its failed requests stays allocated.
        check(asyncio.run(attack(SECONDS / 2)))
        before = at_rest(server)
        outcome = asyncio.run(attack(SECONDS, SECONDS / 2))
        check(outcome)
        assert outcome.statuses[503], f"SEED={SEED}: no fault was felt, {outcome}"
        wait_until(lambda: client.get("/ready").status_code == 200)
        assert canary(client) == said
        after = at_rest(server)
        assert after.rss - before.rss < GROWTH, f"SEED={SEED}: {before}, {after}"
        assert (after.descriptors, after.threads) == (before.descriptors, before.threads)
        server.process.stderr = None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=30) == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_a_stop_under_load(signals):
    """After one signal, requests already received are answered and the exit code is 0. After two,
    the server stops at once, and every request still has an answer."""
    with tape_server(PATIENCE, server=SERVER | {"log_requests": False}, fork=False) as (
        server,
        client,
    ):
        requests = known(client)

        async def attack():
            crowd = Crowd(server.address, requests)
            async with crowd:
                await crowd.until(1500)
                for _ in range(signals):
                    server.process.send_signal(signal.SIGTERM)
                    await asyncio.sleep(0.05)
                crowd.end()
                await asyncio.to_thread(server.process.wait, 30)
            return crowd.outcome

        engine = engine_of(server)
        outcome = asyncio.run(attack())
        # A connection that opens while the listener closes carries no accepted request.
        check(outcome, broken=outcome.unsent)
        code = server.process.returncode
        assert code in ((0,) if signals == 1 else (0, 128 + signal.SIGTERM)), outcome
        wait_until(lambda: not running(engine), seconds=10)


@pytest.fixture
def clock(tmp_path, monkeypatch):
    """A function that sets the offset of the servers' wall clock, in seconds; a library loaded
    before libc supplies that clock."""
    library, offset = tmp_path / "clock.so", tmp_path / "offset"
    source = Path(__file__).parents[1] / "support/clock.c"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)

    def jump(seconds):
        with offset.open("r+b") as file:
            file.write(struct.pack("=q", seconds))

    offset.write_bytes(bytes(8))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("WALL_CLOCK_OFFSET", str(offset))
    return jump


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_clock_that_jumps(clock):
    """Scores stay, a request waits its full timeout, and refusals name the wait as before."""
    options = {"server": {"log_requests": True}, "engine": {"max_queued_requests": 2}}
    with tape_server(**options, fork=False) as (server, client):
        pid, said = engine_of(server), canary(client)
        for jump in JUMPS:
            with in_flight(client, HELD) as held, Connection(client) as late:
                start = time.monotonic()
                late.request("POST", "/v1/score", "X-Request-Timeout-Ms: 700", body=body_of(1))
                wait_until(lambda: under_way(client) == 2)
                clock(jump)
                check_error(late.reply(), 504, "deadline_exceeded", None)
                assert 0.6 < time.monotonic() - start < 5
                with in_flight(client, 1):
                    refused = client.post("/v1/score", content=body_of(1), headers=JSON)
                    check_error(refused, 429, "overloaded", None)
                    assert 1 <= retry_after(refused) <= 30
                assert let_go(held).status == 200
            assert canary(client) == said, f"after {jump} s"
        assert engine_of(server) == pid
        server.process.send_signal(signal.SIGTERM)
        log = server.process.stderr.read()
    assert len(set(re.findall(r'"time":"(\d{4})-', log))) > 1, "the clock did jump"
    spent = [json.loads(line)["total_ms"] for line in log.splitlines() if '"request"' in line]
    assert all(0 <= milliseconds < 60_000 for milliseconds in spent)


def test_a_batch_that_the_engine_has_no_memory_for_is_halved(tmp_path):
    """A real model runs in a real process, and the kernel refuses."""
    body = large_request(20_000, return_label_logprobs=True)
    flags = ("--threads", "1", "--kv-cache-size", "16MiB", "--max-batch-tokens", "16384")
    # glibc takes each tensor from the kernel, which can refuse it, not from what was freed.
    kernel = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    log = tmp_path / "log"
    with (
        serving("demo", *flags, environment=kernel, log=log, fork=False) as server,
        connected(server) as client,
    ):
        (pid,) = children(server.process.pid)
        said = canary(client)
        right = client.post("/v1/score", content=body, headers=JSON).json()["label_logprobs"]
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + SPARE
        resource.prlimit(pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        found = client.post("/v1/score", content=body, headers=JSON).json()["label_logprobs"]
        halved = "gpuscore_oom_total", (("outcome", "retried"),)
        wait_until(lambda: samples_of(client)[halved] >= 1)  # a heartbeat brings it
        assert np.allclose(found, right, rtol=0, atol=2e-4)
        assert canary(client) == said
        assert children(server.process.pid) == [pid]
