"""Promise: no flood of bytes, however it is framed, and no thousands of idle connections delay a
probe or take memory.

Each flood comes from a process of its own, over connections that it reopens when the server closes
them. Before the server took turns between connections, /health waited 15 seconds during a flood of
pipelines and 3 during one of one-byte chunks, and trailers took 400 MB within seconds.
"""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event

import pytest

from support.connections import connected
from support.floods import flooding, probe, sent_by, slowest
from support.vitals import MIB

pytestmark = [pytest.mark.hostile, pytest.mark.alone]

SECONDS = 8
# Seconds that the median probe and the slowest may take. Ten times what it takes without a flood is
# allowed too, because the machine may be slow and busy with other work.
USUAL, LATE, FACTOR = 0.5, 1.0, 10
FLOODED, IDLE = 20 * MIB, 64 * MIB  # memory during a flood, and for all idle connections
CONNECTIONS = 2_000


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
    server, patient, record_property, kind, width, megabytes, least
):
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
    usual, median, late = calm[25], took[len(took) // 2], took[len(took) * 99 // 100]
    probes = f"{1e3 * median:.0f}, {1e3 * late:.0f} and {1e3 * took[-1]:.0f} ms of {len(took)}"
    said = f"/health: median, 99 % and longest {probes}; before {1e3 * usual:.0f}"
    record_property("said", f"{kind}: {said}; {most / MIB:+.0f} MiB at most; {sent}")
    assert median < USUAL + FACTOR * usual
    assert took[-1] < LATE + FACTOR * calm[-1]
    assert most < FLOODED
    assert sent.answers >= least, sent


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"POST /v1/score HTTP/1.1\r\nHost: a\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",  # then the connection stays open
    ],
    ids=["nothing", "half a head", "a request"],
)
def test_idle_connections(server, patient, said):
    """They arrive at once; while they are open others are served, and the server ends them."""

    def asked():  # on a connection that is open already
        start = time.monotonic()
        assert client.get("/health").status_code == 200
        return time.monotonic() - start

    arrived = Event()
    with connected(server) as client, ExitStack() as opened, ThreadPoolExecutor(1) as other:
        asked()
        probing = other.submit(slowest, asked, lambda: not arrived.is_set())
        idle = []
        for _ in range(CONNECTIONS):
            idle.append(opened.enter_context(socket.create_connection(server.address, timeout=10)))
            idle[-1].sendall(said)
        began = time.monotonic()
        assert patient.grew() < IDLE
        arrived.set()
        assert probing.result() < LATE
        for connection in idle:
            while connection.recv(4096):  # times out if the server never closes
                pass
        assert time.monotonic() - began < 30
    patient.check(f"{CONNECTIONS} idle connections")
