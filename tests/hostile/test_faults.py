"""Promise: whatever happens to the engine, the streams or the server itself, each of 1,024 requests
in flight gets exactly one answer: the right scores, or an error of the contract.

Seeded: SEED=... in the environment gives another schedule; failures name it.
"""

import asyncio
import json
import math
import os
import random
import signal
import time
from contextlib import suppress

import pytest

from support.connections import canary
from support.many_callers import Crowd
from support.serving import children, running, wait_until
from support.tape_servers import JSON, engine_of, tape_server
from support.vitals import GROWTH, SETTLE, vitals

SEED = int(os.environ.get("SEED", "14"))
SECONDS = 20.0  # of injected faults
PATIENCE = {"delay": 0.3, "stopped": 2.5, "forgiven": 0}
SERVER = {"max_inflight_per_key": 4096, "log_requests": True}
pytestmark = pytest.mark.hostile


def known(client):
    """Return requests of one to forty tokens in up to nine items, with their scores on a healthy
    server."""
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
