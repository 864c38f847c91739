"""Promise: several HTTP workers are one server, with limits, keys, metrics and engine in common;
one that is lost takes only its own connections along."""

import asyncio
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from gpuscore.config import ServerConfig
from gpuscore.errors import ConfigError
from gpuscore.processes.fronts.parent import SILENT
from gpuscore.processes.worker.frames import encode
from gpuscore.processes.worker.messages import Close, score_message
from gpuscore.server.http.address import bind_all
from support.connections import Connection, check_error, post
from support.many_callers import Crowd
from support.serving import children, running, sockets_of, wait_until
from support.tape_backend import tape_logit, tape_lse
from support.tape_engine import HELD, MARK
from support.tape_servers import body_of, engine_of, fronts_of, tape_server
from support.watched_server import samples_of
from worker.test_client import request_of

PATIENCE = {"first_delay": 0.3, "max_delay": 0.3, "stopped": 2.5, "forgiven": 0}
TWO = {"http_workers": 2, "max_inflight_per_key": 4096}
GROWING = ("counter", "histogram")
ALICE, BOB = "key-of-alice", "key-of-bob"


@pytest.fixture(scope="module")
def shared():
    # Fronts that take a while until they can score.
    with tape_server(PATIENCE, TWO, environment={"TAPE_LOADS": "0.3"}) as started:
        yield started


@pytest.fixture
def two(shared):
    """A server of two fronts that several tests share, once it is whole."""
    server, client = shared
    wait_until(lambda: len(fronts_of(server)) == 2 and engine_of(server))
    wait_until(lambda: all(is_ready(client) for _ in range(8)))
    return server, client


def is_ready(client):
    """Ask over a new connection, which any of the fronts may get."""
    return httpx.get(f"{client.base_url}/ready", headers=client.headers).status_code == 200


@pytest.fixture(scope="module")
def known(shared):
    """Bodies and their scores, as one front gives them; they come from the prompts' tape."""
    rng, scored = random.Random(18), []
    for _ in range(32):
        items = [rng.choices(range(1, 800), k=rng.randint(1, 20)) for _ in range(rng.randint(1, 5))]
        query = rng.choices(range(1, 800), k=rng.randint(0, 40))
        body = json.dumps({"query": query, "items": items, "label_token_ids": [3, 5]}).encode()
        scores = post(shared[1], body).json()["scores"]
        assert scores == [pytest.approx(tape_scores(query + item)) for item in items]
        scored.append((body, scores))
    return scored


def tape_scores(prompt):
    return [math.exp(float(tape_logit(prompt, x)) - float(tape_lse(prompt))) for x in (3, 5)]


def under_load(server, known, meanwhile, answers=300, size=64):
    """Run `meanwhile` in a thread while callers check every answer; return what became of them."""

    async def run():
        async with Crowd(server.address, known, size) as crowd:
            await crowd.until(answers)
            await asyncio.to_thread(meanwhile)
            await crowd.until(answers)
        return crowd.outcome

    outcome = asyncio.run(run())
    assert not outcome.wrong, outcome.wrong[:5]
    return outcome


def open_connections(pid):
    """Return the number of TCP connections that a process has, its listener left out."""
    sockets = sockets_of(pid)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "01" and row[9] in sockets for row in rows)


class TestOneServer:
    def test_both_answer_and_their_metrics_add_up(self, two):
        _, client = two
        before = samples_of(client)
        names = set()
        for _ in range(16):
            with connected_anew(client) as front:
                reply = front.post("/v1/score", content=body_of(1, 2), headers=JSON)
                assert reply.status_code == 200
                names.add(reply.headers["x-request-id"])
        assert len(names) == 16
        assert len({name[:20] for name in names}) == 2, "made by two processes"
        key = ("gpuscore_requests_total", ok_labels())
        for _ in range(4):
            with connected_anew(client) as front:
                after = samples_of(front)
            assert after[key] - before.get(key, 0) == 16
            assert after["gpuscore_items_total", ()] - before["gpuscore_items_total", ()] == 16
            assert after["gpuscore_requests_running", ()] == 1, "the scrape itself"
            pages = [value for (name, _), value in after.items() if name == "gpuscore_kv_pages"]
            assert sum(pages) == 4096, "the engine's, not added up"

    def test_a_limit_holds_for_all_together(self):
        with (
            tape_server(PATIENCE, TWO | {"max_connections": 40}, {"max_queued_requests": 6}) as up,
            ExitStack() as stack,
        ):
            server, client = up
            MARK.unlink(missing_ok=True)
            opened = [stack.enter_context(Connection(client)) for _ in range(24)]
            opened[0].request(body=body_of(HELD))
            wait_until(MARK.exists)
            for connection in opened[1:]:
                connection.request(body=body_of(1))
            wait_until(lambda: sum(not connection.silent for connection in opened) >= 24 - 7)
            time.sleep(0.3)
            refused = [connection for connection in opened if not connection.silent]
            for connection in refused:
                message = check_error(connection.reply(), 429, "overloaded", None)
                assert re.match(r"[67] requests with \d+ tokens are in flight", message), message
            assert 24 - 7 <= len(refused) <= 24 - 6, "within one for the second front"
            assert all(open_connections(pid) for pid in fronts_of(server))
            MARK.unlink()
            assert {
                connection.reply().status for connection in opened if connection not in refused
            } == {200}
            for _ in range(30):
                stack.enter_context(Connection(client))
            wait_until(lambda: sum(map(open_connections, fronts_of(server))) <= 41, seconds=5)
            assert sum(map(open_connections, fronts_of(server))) >= 40

    def test_a_second_server_cannot_have_the_port(self, two):
        host, port = two[0].address
        for workers in (1, 2):
            with pytest.raises(ConfigError, match=f"cannot bind --host .* --port {port}: .*use"):
                bind_all(ServerConfig(host=host, port=port), workers)


JSON = {"content-type": "application/json"}


def connected_anew(client):
    """Return a client with connections of its own, which any front may get."""
    return httpx.Client(base_url=client.base_url, headers=client.headers, trust_env=False)


def ok_labels():
    return (("code", ""), ("method", "POST"), ("route", "/v1/score"), ("status", "200"))


class TestLosses:
    def test_a_lost_front_takes_only_its_own_connections(self, two, known):
        server, client = two
        engine, lost = engine_of(server), {}

        def harm():
            victim, other = fronts_of(server)
            lost["connections"] = open_connections(victim)
            os.kill(victim, signal.SIGKILL)
            start = time.monotonic()
            wait_until(lambda: set(fronts_of(server)) - {victim, other}, seconds=5)
            lost["seconds"] = time.monotonic() - start
            assert other in fronts_of(server)

        with watching_counters(client) as seen:
            outcome = under_load(server, known, harm)
        assert outcome.broken <= lost["connections"]
        assert set(outcome.statuses) == {200}, outcome
        assert not outcome.unsent, "no connection was refused"
        assert engine_of(server) == engine
        assert len(seen) >= 3
        assert lost["seconds"] < 2

    @pytest.mark.slow
    def test_a_lost_engine_is_lost_to_both_and_comes_back(self, two, known):
        server, client = two
        lost = engine_of(server)

        def harm():
            os.kill(lost, signal.SIGKILL)
            wait_until(lambda: [status(client, "/health") for _ in range(6)] == [503] * 6)
            assert status(client, "/livez") == 200
            wait_until(lambda: [status(client, "/ready") for _ in range(6)] == [200] * 6)

        with watching_counters(client):
            outcome = under_load(server, known, harm)
        assert set(outcome.statuses) == {200, 503}, outcome
        assert not outcome.broken
        assert engine_of(server) != lost
        for _ in range(4):
            with connected_anew(client) as front:
                assert samples_of(front)["gpuscore_engine_restarts_total", ()] >= 1

    @pytest.mark.slow
    def test_a_front_that_hangs_is_replaced(self, two):
        server, client = two
        victim, other = fronts_of(server)
        os.kill(victim, signal.SIGSTOP)
        wait_until(lambda: not running(victim), seconds=SILENT + 5)
        wait_until(lambda: len(fronts_of(server)) == 2)
        assert other in fronts_of(server)
        assert {status(client, "/ready") for _ in range(6)} == {200}

    def test_whatever_a_front_sends_ends_its_connection_only(self, two):
        server, client = two
        address, engine = engine_address(engine_of(server)), engine_of(server)
        cut_off = frame(b"\x9c\xa5Score")  # an array of 12, and no more
        twice = 2 * frame(encode(score_message(1, request_of(1))))
        close, huge, wrong = frame(encode(Close())), b"\xff" * 64, frame(b"\xc1\xc1\xc1")
        for sent in (wrong, huge, cut_off, close, twice):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(10)
                sock.connect(address)
                sock.sendall(sent)
                wait_until(
                    lambda sock=sock: not sock.recv(4096)
                )  # Ready, perhaps heartbeats, then the end
        with socket.socket(socket.AF_UNIX) as sock:  # half a frame, and then it leaves
            sock.connect(address)
            sock.sendall(b"\xff\0\0\0half")
        assert post(client, body_of(1, 2)).status_code == 200
        assert engine_of(server) == engine

    @pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
    def test_another_user_gets_nothing_from_the_engine(self, two):
        address = engine_address(engine_of(two[0]))
        code = (
            "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
            "s.connect('\\0' + sys.argv[1]); print(s.recv(100))"
        )
        done = subprocess.run(
            [sys.executable, "-IS", "-c", code, address[1:]], capture_output=True, text=True
        )
        assert done.stdout == "b''\n", done


def status(client, path):
    """Return the status of a request over a new connection."""
    return httpx.get(f"{client.base_url}{path}", headers=client.headers).status_code


def frame(content):
    return len(content).to_bytes(4, "little") + content


def engine_address(pid):
    """Return the abstract address on which an engine listens."""
    sockets = sockets_of(pid)
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    (name,) = {r[7] for r in rows if len(r) > 7 and r[3] != "00000000" and r[6] in sockets}
    return name.replace("@", "\0", 1)


@contextmanager
def watching_counters(client):
    """Scrape over new connections all the time; no counter may ever fall."""
    ended, seen, fallen = threading.Event(), [], []

    def scrape():
        before = {}
        while not ended.is_set():
            try:
                with connected_anew(client) as front:
                    now = samples_of(front, GROWING)
            except httpx.TransportError:  # the front that was killed
                continue
            fallen.extend(key for key in before if now.get(key, -1) < before[key])
            before = now
            seen.append(len(now))
            time.sleep(0.02)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
    fallen = [key for key in fallen if not key[0].endswith("_created")]
    assert not fallen


class TestEnds:
    def test_a_stop_under_load_answers_what_was_sent(self):
        with tape_server(PATIENCE, TWO) as (server, client), ExitStack() as stack:
            MARK.unlink(missing_ok=True)
            held = [stack.enter_context(Connection(client)) for _ in range(8)]
            held[0].request(body=body_of(HELD))
            wait_until(MARK.exists)
            for connection in held[1:]:
                connection.request(body=body_of(1))
            wait_until(lambda: samples_of(client)["gpuscore_requests_running", ()] == 9)
            pids = [server.process.pid, *fronts_of(server), engine_of(server)]
            for pid in pids:  # as a terminal does
                os.kill(pid, signal.SIGINT)
            wait_until(lambda: {status(client, "/ready") for _ in range(4)} == {503})
            check_error(post(client, body_of(1)), 503, "unavailable", None)
            MARK.unlink()
            assert {connection.reply().status for connection in held} == {200}
            assert server.process.wait(timeout=20) == 0
            wait_until(lambda: not any(map(running, pids)))

    @pytest.mark.slow
    def test_a_second_signal_answers_503_and_ends(self):
        with tape_server(PATIENCE, TWO) as (server, client), ExitStack() as stack:
            MARK.unlink(missing_ok=True)
            held = [stack.enter_context(Connection(client)) for _ in range(6)]
            held[0].request(body=body_of(HELD))
            wait_until(MARK.exists)
            for connection in held[1:]:
                connection.request(body=body_of(1))
            wait_until(lambda: samples_of(client)["gpuscore_requests_running", ()] == 7)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: {status(client, "/ready") for _ in range(4)} == {503})
            start = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            for connection in held:
                check_error(connection.reply(), 503, "unavailable", None)
            assert server.process.wait(timeout=20) == 128 + signal.SIGTERM
            assert time.monotonic() - start < 5
            MARK.unlink(missing_ok=True)

    def test_a_hangup_changes_the_keys_of_all_and_of_those_that_come_later(self, tmp_path):
        keys = tmp_path / "keys"
        keys.write_text(ALICE)
        config = TWO | {"api_key_file": str(keys)}
        with tape_server(PATIENCE, config) as (server, _):
            assert accepted(server, ALICE) == {200}
            assert accepted(server, BOB) == {401}
            keys.write_text(BOB)
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: accepted(server, BOB) == {200})
            assert accepted(server, ALICE) == {401}
            keys.unlink()  # what a new front could read is not what is valid
            os.kill(victim := fronts_of(server)[0], signal.SIGKILL)
            wait_until(lambda: victim not in fronts_of(server) and len(fronts_of(server)) == 2)
            assert accepted(server, BOB) == {200}
            assert accepted(server, ALICE) == {401}
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=20) == 0

    @pytest.mark.slow
    def test_fronts_that_always_end_end_the_server(self):
        start = time.monotonic()
        with (
            pytest.raises(AssertionError, match="5 HTTP workers in a row ended at their start"),
            tape_server(PATIENCE, TWO, environment={"TAPE_FRONTS_END": "1"}),
        ):
            pass
        assert time.monotonic() - start < 30

    @pytest.mark.slow
    @pytest.mark.parametrize("lost", ["parent", "forker", "engine"])
    def test_nothing_outlives_a_loss_that_cannot_be_mended(self, lost):
        patience = PATIENCE | {"max_failures": 1, "forgiven": 60}
        with tape_server(patience, TWO) as (server, _):
            parent, engine, fronts = server.process.pid, engine_of(server), fronts_of(server)
            (forker,) = set(children(parent)) - {engine}
            os.kill({"parent": parent, "forker": forker, "engine": engine}[lost], signal.SIGKILL)
            code = {"parent": -signal.SIGKILL, "forker": 70, "engine": 70}[lost]
            assert server.process.wait(timeout=20) == code
            wait_until(lambda: not any(map(running, (engine, forker, *fronts))))


def accepted(server, key):
    """Return the statuses that requests with a key get over several new connections."""
    headers = JSON | {"authorization": f"Bearer {key}"}
    url = f"{server.url}/v1/score"
    return {httpx.post(url, content=body_of(1), headers=headers).status_code for _ in range(6)}
