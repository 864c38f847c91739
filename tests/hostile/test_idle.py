"""Promise: idle connections cost little, and the server closes them."""

import socket
from contextlib import ExitStack
from time import monotonic, sleep

import pytest

from support.connections import connected
from support.serving import RunningServer
from support.vitals import Patient, vitals

pytestmark = [pytest.mark.hostile, pytest.mark.alone]

CONNECTIONS = 2_000
MEMORY = 64 * 2**20  # bytes for all of them
BEGUN = b"POST /v1/score HTTP/1.1\r\nHost: a\r\n"
OPEN = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"  # then the connection stays open


@pytest.mark.parametrize("said", [b"", BEGUN, OPEN], ids=["nothing", "half a head", "a request"])
def test_idle_connections(server: RunningServer, patient: Patient, said: bytes) -> None:
    """While 2,000 are open, others are served; the server closes every one in time."""
    with ExitStack() as opened, connected(server) as client:
        idle = []
        for _ in range(CONNECTIONS):
            idle.append(opened.enter_context(socket.create_connection(server.address, timeout=10)))
            idle[-1].sendall(said)
        began = monotonic()
        assert client.get("/health").status_code == 200
        assert patient.grew() < MEMORY
        assert monotonic() - began < 5
        for connection in idle:
            while connection.recv(4096):  # times out if the server never closes
                pass
        assert monotonic() - began < 30
    sleep(0.5)
    patient.check(f"{CONNECTIONS} idle connections")
    assert vitals(server.process.pid).descriptors < CONNECTIONS
