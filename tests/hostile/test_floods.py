"""Promise: no flood of bytes, however it is framed, makes a probe wait or takes memory.

Each flood comes from a process of its own, over connections that are opened again when the server
closes them. Before the server took turns, /health waited 15 seconds for pipelines, 3 for one-byte
chunks, and trailers took 400 MB within seconds.
"""

import socket
import time

import pytest

from support.floods import flooding, sent_by
from support.serving import serving
from support.vitals import MIB, Patient
from support.wire import canary, connected

pytestmark = [pytest.mark.hostile, pytest.mark.alone]

SECONDS = 8
# Seconds that a probe may take in half of all cases, and at most; besides, ten times what it takes
# without a flood, because the machine may be slow and have others to serve.
USUAL, LATE, FACTOR = 0.5, 1.0, 10
TIMES = ("--header-timeout", "1", "--body-timeout", "2")


@pytest.fixture(scope="module")
def flooded():
    with (
        serving("demo", "--threads", "1", "--no-log-requests", *TIMES) as server,
        connected(server) as http,
    ):
        yield server, http


def probe(address):
    """Seconds that /health takes on a connection of its own."""
    start = time.monotonic()
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 200 ")
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("kind", "width", "megabytes", "least"),
    [
        ("pipelined", 40, 0.3, 1000),  # 10,000 requests over each
        ("trailers", 30, 30, 30),
        ("extensions", 30, 30, 30),
        ("one-byte chunks", 30, 30, 0),
    ],
)
def test_probes_are_answered_and_memory_stays(flooded, kind, width, megabytes, least):
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
    assert took[len(took) // 2] < USUAL + FACTOR * calm[25]
    assert took[-1] < LATE + FACTOR * calm[-1]
    assert most < 20 * MIB
    assert sent.answers >= least, sent
