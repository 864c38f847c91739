"""Promise: one connection never delays the others for long, is answered in order, and hides no
request.

The requests are ones that HTTP clients would not send, to real servers; `test_protocol` compares
what is read with another parser.
"""

import json
import socket
import time
from contextlib import suppress

import pytest

from support.connections import Connection, check_error, under_way
from support.serving import wait_until
from support.tape_engine import HELD, MARK
from support.tape_servers import body_of, in_flight, let_go
from support.vitals import vitals

GOOD = json.dumps({"items": [[5]], "label_token_ids": [3]}).encode()
SCORE = ("POST", "/v1/score")
UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAM")


def test_a_thousand_requests_are_answered_in_order(client, server):
    before = vitals(server.process.pid).rss
    with Connection(client) as connection, Connection(client) as other:
        heads = [connection.head("GET", f"/{i % 7}", f"X-Request-Id: n-{i}") for i in range(1000)]
        connection.socket.setblocking(True)
        connection.send(b"".join(heads))
        for _ in range(5):  # it is served although the other connection has so much to do
            other.request("GET", "/health")
            assert other.reply().status == 200
        ids = [connection.reply().headers["x-request-id"] for _ in heads]
    assert ids == [f"n-{i}" for i in range(1000)]
    assert vitals(server.process.pid).rss - before < 10 * 2**20


def test_what_is_behind_a_request_waits_until_it_is_answered(full):
    """The server reads once; all further requests stay in the client's memory."""
    with in_flight(full, HELD) as held:
        with suppress(BlockingIOError):
            held.socket.setblocking(False)
            for _ in range(10_000):
                held.socket.send(b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        held.socket.setblocking(True)
        assert under_way(full) == 1
        assert let_go(held).status == 200
        assert held.reply().status == 404


def test_upgrades_expectations_and_old_clients(client):
    """An upgrade is ignored; HTTP/1.0 gets no interim answer, and its connection ends."""
    with Connection(client) as connection:
        for fields in (UPGRADE, ("Expect: something",)):
            connection.request(*SCORE, *fields, body=GOOD)
            assert connection.reply().status == 200
        connection.send(connection.head(*SCORE, "Expect: 100-continue", body=GOOD))
        assert connection.interim() == 100
        connection.send(GOOD)
        assert connection.reply().status == 200
        old = connection.head(*SCORE, *UPGRADE, "Expect: 100-continue", body=GOOD)
        connection.send(old.replace(b"HTTP/1.1", b"HTTP/1.0"))
        time.sleep(0.2)
        connection.send(GOOD)
        assert connection.socket.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"
        assert connection.reply().headers["connection"] == "close"
        assert connection.closed


@pytest.mark.parametrize("target", ["/v1/%73core", "/v1%2fscore", "/v1/sco%72e?a"])
def test_key_and_room_are_asked_for_in_any_form(busy, stranger, target):
    with Connection(busy) as connection:
        connection.send(connection.head("POST", target, length=9))  # refused at once
        check_error(connection.reply(), 429, "overloaded", None)
    with Connection(stranger) as connection:
        connection.request("POST", target, body=GOOD)
        check_error(connection.reply(), 401, "invalid_api_key", None)


def test_head_says_what_get_would(client):
    with Connection(client) as connection:
        for target, status in (("/ready", 200), ("/docs", 200), ("/v1/score", 405), ("/no", 404)):
            connection.request("GET", target)
            get = connection.reply()
            connection.request("HEAD", target)
            head = connection.reply(has_body=False)
            assert head.status == get.status == status
            assert head.headers["content-length"] == get.headers["content-length"]


@pytest.mark.parametrize("how", ["closes", "closes, 1.0", "closes its sending side"])
def test_the_request_of_a_client_that_leaves_is_cancelled(full, how):
    MARK.unlink(missing_ok=True)
    with Connection(full) as connection:
        sent = connection.head(body=body_of(HELD)) + body_of(HELD)
        connection.send(sent.replace(b"HTTP/1.1", b"HTTP/1.0", 1) if "1.0" in how else sent)
        wait_until(MARK.exists)
        assert under_way(full) == 1
        if how == "closes its sending side":
            connection.socket.shutdown(socket.SHUT_WR)
            assert connection.closed
    wait_until(lambda: under_way(full) == 0, seconds=5)
    MARK.unlink(missing_ok=True)


class TestTheRestOfARefusedBody:
    """It is read up to a bound: refusing it costs little, and a client that sends all before it
    reads finds the answer."""

    MOST, KERNEL = 16 * 2**20, 16 * 2**20  # --max-body-bytes; buffers of both sides

    def test_it_is_read_up_to_a_bound(self, limited):
        with Connection(limited, timeout=2.5) as connection:
            connection.send(connection.head(*SCORE, length=10**9, key=False))
            sent, most = 0, self.MOST + self.KERNEL
            with suppress(TimeoutError, ConnectionError):
                while sent < most:
                    sent += connection.socket.send(bytes(2**16))
            assert sent < most

    @pytest.mark.parametrize(("target", "status"), [("/none", 404), ("/v1/score", 415)])
    def test_one_that_is_sent_whole_finds_its_answer(self, client, target, status):
        """The application's refusals even keep the connection."""
        with Connection(client) as connection:
            for _ in range(1 if status == 404 else 2):
                connection.request("POST", target, "Content-Encoding: br", body=bytes(10**7))
                assert connection.reply().status == status

    @pytest.mark.parametrize("large", [False, True])
    def test_an_answer_before_the_body_says_whether_the_connection_stays(self, limited, large):
        body = b" " * (2**20 + 1 if large else 2**10)
        fields = ("Content-Type: text/plain", f"Content-Length: {len(body)}")
        with Connection(limited) as connection:
            connection.request(*SCORE, *fields)
            reply = connection.reply()
            assert reply.status == 415
            connection.send(body)
            assert (reply.headers.get("connection") == "close") is large
            if large:
                assert connection.closed
            else:
                connection.request("GET", "/health")
                assert connection.reply().status == 200
