"""Promise: no flood of bytes, however it is framed, delays a probe or takes memory.

Each flood comes from a process of its own, over connections that it reopens when the server closes
them. Before the server took turns between connections, /health waited 15 seconds during a flood of
pipelines and 3 during one of one-byte chunks, and trailers took 400 MB within seconds.
"""

import time

import pytest

from support.connections import canary, connected
from support.floods import flooding, probe, sent_by
from support.serving import serving
from support.vitals import MIB, Patient

pytestmark = [pytest.mark.hostile, pytest.mark.alone]

SECONDS = 8
# Seconds that the median probe and the slowest may take. Ten times what it takes without a flood is
# allowed too, because the machine may be slow and busy with other work.
USUAL, LATE, FACTOR = 0.5, 1.0, 10
TIMES = ("--client-timeout", "1")


@pytest.fixture(scope="module")
def flooded():
    with (
        serving("demo", "--threads", "1", "--no-log-requests", *TIMES, fork=False) as server,
        connected(server) as http,
    ):
        yield server, http


@pytest.mark.parametrize(
    ("kind", "width", "megabytes", "least"),
    [
        ("pipelined", 40, 0.3, 1000),  # 10,000 requests on each connection
        ("trailers", 30, 30, 30),
        ("extensions", 30, 30, 30),
        ("one-byte chunks", 30, 30, 0),
    ],
)
def test_probes_are_answered_and_memory_stays(
    flooded, record_property, kind, width, megabytes, least
):
    server, http = flooded
    patient = Patient(server.process.pid, lambda: canary(http))
    calm = sorted(probe(server.address) for _ in range(50))
    flood = flooding(kind, server.address, width, SECONDS, megabytes)
    took, most, end = [], 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        took.append(probe(server.address))
        most = max(most, patient.grew())
        time.sleep(0.02)
    sent = sent_by(flood)
    patient.check(kind)
    took.sort()
    median, late = (1e3 * took[len(took) * part // 100] for part in (50, 99))
    record_property(
        "said",
        f"{kind}: /health in {median:.0f} ms (median of {len(took)}), {late:.0f} (99 %), "
        f"{1e3 * took[-1]:.0f} (longest); before it {1e3 * calm[25]:.0f}; "
        f"{most / MIB:+.0f} MiB at most; {sent}",
    )
    assert took[len(took) // 2] < USUAL + FACTOR * calm[25]
    assert took[-1] < LATE + FACTOR * calm[-1]
    assert most < 20 * MIB
    assert sent.answers >= least, sent
