"""Promise: whatever happens to the engine's process, the HTTP side stays up, reports it within 2 s
and recovers; a stop loses no request and leaves no process behind.

Most servers here are real ones over the tape, whose child starts at once.
"""

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpuscore.processes.worker.client import TICK
from gpuscore.processes.worker.process import Patience
from gpuscore.server.http.address import ACCEPTS
from support import tape_engine as tape_child
from support.connections import (
    Connection,
    check_error,
    retry_after,
    under_way,
)
from support.serving import children, running, serving, wait_until
from support.tape_engine import MARK
from support.tape_servers import JSON, PATIENCE, body_of, engine_of, in_flight, tape_server


def test_silence_is_noticed_within_two_seconds():
    """The default silence plus a tick is below 2 s; tests of real silence wait longer."""
    assert Patience().silent + TICK < 2


def scores(client):
    reply = client.post("/v1/score", content=body_of(1, 2), headers=JSON)
    assert reply.status_code == 200, reply.text
    return reply.json()["scores"]


def status(client, path):
    return client.get(path).status_code


def seconds_until_unhealthy(client):
    start = time.monotonic()
    wait_until(lambda: status(client, "/health") == 503, seconds=10)
    return time.monotonic() - start


@pytest.fixture(scope="module")
def tape():
    """A server that forgives a lost engine at once, so that several tests may harm it."""
    engine = {"engine_timeout": 1.5, "max_queued_requests": 2}
    with tape_server(PATIENCE | {"forgiven": 0}, engine=engine, engines=4) as started:
        yield started


@pytest.mark.parametrize("harm", ["killed", "stopped", "stuck"])
def test_the_server_outlives_its_engine(tape, harm):
    server, client = tape
    wait_until(lambda: status(client, "/ready") == 200)
    before, pid = scores(client), engine_of(server)
    token = tape_child.STUCK if harm == "stuck" else tape_child.HELD
    with in_flight(client, token) as connection:
        if harm != "stuck":
            os.kill(pid, signal.SIGKILL if harm == "killed" else signal.SIGSTOP)
        took = seconds_until_unhealthy(client)
        assert took < {"killed": 2, "stopped": 3, "stuck": 1.5 + 3}[harm]
        assert status(client, "/ready") == 503
        assert status(client, "/livez") == 200, "nobody is to restart what heals by itself"
        refused = client.post("/v1/score", content=body_of(1, 2), headers=JSON)
        check_error(refused, 503, "unavailable", None)
        assert 1 <= retry_after(refused) <= 30
        lost = connection.reply()
        check_error(lost, 503, "unavailable", None)
        assert 1 <= retry_after(lost) <= 30
    wait_until(lambda: status(client, "/health") == 200)
    assert status(client, "/ready") == 200
    assert scores(client) == before
    assert engine_of(server) != pid
    assert not running(pid)


def test_a_crash_loop_gives_up():
    patience = {"delay": 0.1, "max_failures": 3}
    with tape_server(patience, engines=3) as (server, client):
        for _ in range(3):
            wait_until(lambda: status(client, "/ready") == 200)
            client.post("/v1/score", content=body_of(tape_child.CRASH), headers=JSON)
        assert server.process.wait(timeout=10) == 70
        error = server.process.stderr.read()
        assert "the engine failed 3 times in a row, last: exit code 9" in error
        assert "Traceback" not in error


def commands(pids):
    return " ".join(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids)


def test_a_model_that_is_never_ready(tmp_path):
    """The real program runs; its engine is stopped while it loads."""
    log = tmp_path / "log"
    limit = {"GPUSCORE_LOAD_TIMEOUT": "1.5"}
    with serving("demo", environment=limit, wait=False, log=log, fork=False) as server:
        # The child must run its own program first: until then its parent waits for it.
        wait_until(lambda: "gpuscore.processes.worker" in commands(children(server.process.pid)))
        os.kill(engine_of(server), signal.SIGSTOP)
        assert server.process.wait(timeout=20) == 75
    assert "within --load-timeout 1.5 s" in log.read_text().splitlines()[-1]


def test_a_stopped_child_dies_with_its_parent():
    with tape_server() as (server, client):
        pid = engine_of(server)
        with in_flight(client, tape_child.STUCK):
            os.kill(pid, signal.SIGSTOP)
            server.process.kill()
            wait_until(lambda: not running(pid), seconds=2)


def test_a_drain_keeps_the_door_open():
    """Requests in flight are finished, new ones are refused with the reason, no process is left."""
    with tape_server() as (server, client):
        pid = engine_of(server)
        with (
            in_flight(client, tape_child.HELD) as held,
            Connection(client) as kept,
            Connection(client) as arriving,
        ):
            kept.send(kept.head("GET", "/health"))
            assert "connection" not in kept.reply().headers
            body = body_of(1, 2)
            arriving.send(arriving.head(body=body) + body[:5])
            wait_until(lambda: under_way(client) == 2)
            # Ctrl-C and a closed terminal send their signal to the child too.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, number)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: status(client, "/ready") == 503)
            time.sleep(0.3)  # a listener that is merely slow would close by now
            assert status(client, "/health") == 200
            for connection in (Connection(client), kept):  # a new connection, and an open one
                check_refused_by_drain(connection)
            arriving.send(body[5:])
            MARK.unlink()
            for connection in (arriving, held):
                answer = connection.reply()
                assert answer.status == 200
                assert answer.headers["connection"] == "close"
        assert server.process.wait(timeout=10) == 0
        assert not running(pid)
        assert server.process.stderr.read() == ""


def check_refused_by_drain(connection):
    with connection:
        connection.request(body=body_of(1, 2))
        reply = connection.reply()
        assert "shutting down" in check_error(reply, 503, "unavailable", None)
        assert retry_after(reply) >= 1
        assert reply.headers["connection"] == "close"
        assert connection.closed


def test_a_drain_that_takes_too_long():
    with (
        tape_server(server={"drain_timeout": 0.5}) as (server, client),
        in_flight(client, tape_child.STUCK) as connection,
    ):
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        reply = connection.reply()
        assert "shutting down" in check_error(reply, 503, "unavailable", None)
        assert server.process.wait(timeout=5) == 128 + signal.SIGTERM
        assert 0.5 <= time.monotonic() - start < 0.5 + 2.5


def test_a_second_signal():
    with tape_server() as (server, client):
        pid = engine_of(server)
        with in_flight(client, tape_child.STUCK) as connection:
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert server.process.poll() is None
            start = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            check_error(connection.reply(), 503, "unavailable", None)
            assert server.process.wait(timeout=10) == 128 + signal.SIGTERM
            assert time.monotonic() - start < 4
        assert not running(pid)


@pytest.mark.parametrize(
    ("numbers", "new", "options"),
    [
        ([signal.SIGTERM], ACCEPTS + 20, {}),
        ([signal.SIGTERM], 5 * ACCEPTS, {"drain_timeout": 0.1}),  # none of them was in flight
        ([signal.SIGTERM, signal.SIGINT], ACCEPTS + 20, {}),
    ],
)
def test_requests_that_nobody_has_read_yet(numbers, new, options):
    """The requests arrive before the signals, on open connections and on more new ones than a round
    accepts. After two signals it has two seconds to refuse them."""
    with tape_server(server=options) as (server, client), ExitStack() as stack:
        kept = [stack.enter_context(Connection(client)) for _ in range(20)]
        for connection in kept:
            connection.request(body=body_of(1, 2))
            assert connection.reply().status == 200
        server.process.send_signal(signal.SIGSTOP)
        late = [stack.enter_context(Connection(client)) for _ in range(new)]
        for connection in (*kept, *late):
            connection.request(body=body_of(1, 2))
        for number in numbers:
            server.process.send_signal(number)
        time.sleep(0.2)  # the server's next look whether it may stop is overdue then
        server.process.send_signal(signal.SIGCONT)
        for connection in (*kept, *late):
            check_error(connection.reply(), 503, "unavailable", None)
        # Two signals at once may end the wait for requests whose work has not begun.
        ended = {0} if len(numbers) == 1 else {0, *(128 + number for number in numbers)}
        assert server.process.wait(timeout=10) in ended
