"""Promise: a wall clock that jumps changes timestamps and nothing else: no deadline, no heartbeat,
no `Retry-After`.

A library loaded before libc supplies the clock to the server and its engine.
"""

import asyncio
import json
import re
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest

from support import tape_engine as tape_child
from support.connections import check_error, metric
from support.many_callers import Crowd
from support.tape_servers import JSON, body_of, engine_of, in_flight, tape_server

SOURCE = Path(__file__).parents[1] / "support/clock.c"
DAY = 86400
JUMPS = (DAY, 0, -DAY, 3600, 20 * 365 * DAY, -1, 0)  # seconds from the true time
pytestmark = [
    pytest.mark.hostile,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


@pytest.fixture
def clock(tmp_path, monkeypatch):
    """A function that sets the offset of the servers' wall clock, in seconds."""
    library, offset = tmp_path / "clock.so", tmp_path / "offset"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=60)

    def jump(seconds):
        with offset.open("r+b") as file:
            file.write(struct.pack("=q", seconds))

    offset.write_bytes(bytes(8))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("WALL_CLOCK_OFFSET", str(offset))
    return jump


def test_a_clock_that_jumps(clock):
    server = {"max_inflight_per_key": 4096, "log_requests": True}
    with tape_server(server=server, engine={"max_queued_requests": 64}, fork=False) as (
        running,
        client,
    ):
        pid = engine_of(running)
        scores = client.post("/v1/score", content=body_of(1, 2), headers=JSON).json()["scores"]

        async def attack():
            async with Crowd(running.address, [(body_of(1, 2), scores)], size=128) as crowd:
                for jump in JUMPS:
                    clock(jump)
                    await crowd.until(300)
                    assert client.get("/health").status_code == 200, f"after {jump} s"
            return crowd.outcome

        outcome = asyncio.run(attack())
        assert not outcome.wrong, outcome.wrong[:5]
        assert outcome.broken == 0
        assert outcome.statuses[429], "refusals were looked at, too"
        assert engine_of(running) == pid
        assert metric(client, "engine_restarts_total") == 0
        check_deadlines(client, clock)
        running.process.send_signal(signal.SIGTERM)
        log = running.process.stderr.read()
    years = {int(year) for year in re.findall(r'"time":"(\d{4})-', log)}
    assert len(years) > 1, "the clock did jump"
    spent = [json.loads(line)["total_ms"] for line in log.splitlines() if '"request"' in line]
    assert all(0 <= milliseconds < 60_000 for milliseconds in spent)


def check_deadlines(client, clock):
    """Check that a request waits its full timeout, wherever the clock jumps meanwhile."""
    for jump in (DAY, -DAY):
        with in_flight(client, tape_child.HELD) as held:
            began = time.monotonic()
            clock(jump)
            headers = JSON | {"X-Request-Timeout-Ms": "700"}
            late = client.post("/v1/score", content=body_of(1), headers=headers)
            assert 0.6 < time.monotonic() - began < 5
            check_error(late, 504, "deadline_exceeded", None)
            tape_child.MARK.unlink()
            assert held.reply().status == 200
