"""Promise: a wall clock that jumps changes timestamps and nothing else: no deadline, no heartbeat,
no `Retry-After`.

A library loaded before libc supplies the clock to the server and its engine.
"""

import json
import re
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest

from support.connections import Connection, canary, check_error, retry_after, under_way
from support.serving import wait_until
from support.tape_engine import HELD
from support.tape_servers import JSON, body_of, engine_of, in_flight, let_go, tape_server

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
