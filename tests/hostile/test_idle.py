"""Promise: thousands of new connections delay no probe; idle ones cost little, and the server ends
them."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event
from time import monotonic, sleep

import pytest

from support.connections import connected
from support.serving import RunningServer
from support.vitals import Patient, vitals

pytestmark = [pytest.mark.hostile, pytest.mark.alone]

CONNECTIONS = 2_000
LATE = 1.0  # seconds of a probe
MEMORY = 64 * 2**20  # bytes for all of them
BEGUN = b"POST /v1/score HTTP/1.1\r\nHost: a\r\n"
OPEN = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"  # then the connection stays open


@pytest.mark.parametrize("said", [b"", BEGUN, OPEN], ids=["nothing", "half a head", "a request"])
def test_idle_connections(server: RunningServer, patient: Patient, said: bytes) -> None:
    """2,000 arrive at once, and while they are open others are served."""
    with connected(server) as client, ExitStack() as opened, ThreadPoolExecutor(1) as other:
        took: list[float] = []
        ended = Event()

        def probes() -> None:
            while not ended.is_set():
                start = monotonic()
                assert client.get("/health").status_code == 200
                took.append(monotonic() - start)

        client.get("/health")  # probes use a connection that is open already
        probing = other.submit(probes)
        idle = []
        for _ in range(CONNECTIONS):
            idle.append(opened.enter_context(socket.create_connection(server.address, timeout=10)))
            idle[-1].sendall(said)
        began = monotonic()
        assert patient.grew() < MEMORY
        ended.set()
        probing.result()
        assert max(took) < LATE, f"the longest of {len(took)} probes"
        for connection in idle:
            while connection.recv(4096):  # times out if the server never closes
                pass
        assert monotonic() - began < 30
    sleep(0.5)
    patient.check(f"{CONNECTIONS} idle connections")
    assert vitals(server.process.pid).descriptors < CONNECTIONS
