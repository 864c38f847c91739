"""Promise: one connection never delays the others for long, is answered in order, and hides no
request.

The requests are ones that HTTP clients would not send, to real servers; `test_protocol` tests the
rules alone.
"""

import json
import re
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from support.connections import Connection, check_error, under_way
from support.serving import wait_until
from support.tape_engine import HELD, MARK
from support.tape_servers import body_of, in_flight, let_go, tape_server

GOOD = json.dumps({"items": [[5]], "label_token_ids": [3]}).encode()
SCORE = ("POST", "/v1/score")
UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAM")
CHUNKED = ("Content-Type: application/json", "Transfer-Encoding: chunked")


@pytest.fixture(scope="module")
def full():
    """A client of a server that accepts one request at a time, and bodies of a megabyte."""
    with tape_server(server={"max_body_bytes": 10**6}, engine={"max_queued_requests": 1}) as (
        _,
        client,
    ):
        yield client


@pytest.fixture
def busy(full):
    with in_flight(full, HELD) as held:
        yield full
        assert let_go(held).status == 200


def resident(server):
    """Return the bytes of resident memory of the server's process."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024


class TestPipelines:
    def test_a_thousand_requests_are_answered_in_order(self, client, server):
        before = resident(server)
        with Connection(client) as connection, Connection(client) as other:
            heads = [
                connection.head("GET", f"/{i % 7}", f"X-Request-Id: n-{i}") for i in range(1000)
            ]
            connection.socket.setblocking(True)
            connection.send(b"".join(heads))
            for _ in range(5):  # it is served although the other connection has so much to do
                other.request("GET", "/health")
                assert other.reply().status == 200
            ids = [connection.reply().headers["x-request-id"] for _ in heads]
        assert ids == [f"n-{i}" for i in range(1000)]
        assert resident(server) - before < 10 * 2**20

    def test_what_is_behind_a_request_waits_until_it_is_answered(self, full):
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


class TestLimits:
    """Bytes around the chunks on the limited server, whose heads may have 2,048 bytes."""

    @pytest.mark.parametrize(
        ("first", "endless"),
        [
            (b"0\r\nX: ", b"a" * 1000),
            (b"0\r\n", b"X: a\r\n" * 200),
            (b"1;", b"a" * 1000),
            (b"1\r\na\r\n", b"1;b=cc\r\na\r\n" * 200),
        ],
        ids=["a trailer", "many trailers", "an extension", "many extensions"],
    )
    def test_what_is_around_the_chunks_counts_as_the_head_does(self, limited, first, endless):
        with Connection(limited) as connection:
            connection.send(connection.head(*SCORE, *CHUNKED) + first + 3 * endless)
            message = check_error(connection.reply(), 431, "header_too_large", None)
            assert "over 2048 bytes" in message
            assert connection.closed

    def test_extensions_and_trailers_within_the_limit_are_accepted(self, limited):
        body = GOOD[:-1] + b',"apply_softmax":true}'
        chunks = b'%x;a=b;c="d"\r\n%s\r\n0;last\r\nX-Sum: 1\r\n\r\n' % (len(body), body)
        with Connection(limited) as connection:
            for _ in range(3):  # the limit counts each request alone
                connection.send(connection.head(*SCORE, *CHUNKED, "X: " + "y" * 1000) + chunks)
                assert connection.reply().status == 200

    @pytest.mark.parametrize("length", [10**7, 2**64 - 1])
    def test_an_absurd_length_on_a_busy_server(self, busy, length):
        with Connection(busy) as connection:
            connection.request(length=length)
            check_error(connection.reply(), 413, "body_too_large", None)
            assert connection.closed


class TestUpgrades:
    def test_an_upgrade_is_ignored_in_http_1_1_and_1_0(self, client):
        with Connection(client) as connection:
            for _ in range(2):
                connection.request(*SCORE, *UPGRADE, body=GOOD)
                assert connection.reply().status == 200
            old = connection.head("GET", "/health", *UPGRADE).replace(b"HTTP/1.1", b"HTTP/1.0")
            connection.send(old)
            assert connection.reply().headers["connection"] == "close"
            assert connection.closed

    @pytest.mark.parametrize(
        "head",
        [
            b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n"
            b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
            b"CONNECT a:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ],
        ids=["no host", "two hosts", "gzip, chunked", "connect"],
    )
    def test_a_bad_head_is_answered_behind_the_others(self, watched, head):
        before = watched.log.read_text().count("Traceback")
        with Connection(watched.client) as connection:
            connection.send(connection.head("GET", "/health") + head)
            assert connection.reply().status == 200
            check_error(connection.reply(), 400, "invalid_request", None)
            assert connection.closed
        assert watched.log.read_text().count("Traceback") == before


class TestTargets:
    @pytest.mark.parametrize(
        ("target", "status"),
        [
            ("/%76%31/%73core?x=%2f", 200),
            ("/v1/%2573core", 404),
            ("/v1/score%0A", 404),
            ("http://elsewhere/v1/score", 400),
            ("*", 400),
        ],
    )
    def test_a_target_finds_its_route(self, client, target, status):
        with Connection(client) as connection:
            connection.request("POST", target, body=GOOD)
            assert connection.reply().status == status

    @pytest.mark.parametrize("target", ["/v1/%73core", "/v1%2fscore", "/v1/sco%72e?a"])
    def test_the_gate_sees_the_route_in_any_form(self, busy, target):
        with Connection(busy) as connection:
            connection.send(connection.head("POST", target, length=9))  # refused at once
            check_error(connection.reply(), 429, "overloaded", None)

    @pytest.mark.parametrize("target", ["/v1/%73core", "/v1%2fscore", "/metric%73", "/docs/%2e%2e"])
    def test_the_key_is_asked_for_in_any_form(self, limited_server, limited, target):
        with Connection(limited) as connection:
            connection.request("POST", target, body=GOOD, key=False)
            check_error(connection.reply(), 401, "invalid_api_key", None)

    @pytest.mark.parametrize("target", ["/health", "/ready", "/docs", "/v1/models"])
    def test_head_says_what_get_would(self, client, target):
        with Connection(client) as connection:
            connection.request("GET", target)
            get = connection.reply()
            connection.request("HEAD", target)
            head = connection.reply(has_body=False)
            assert head.status == get.status == 200
            assert head.headers["content-length"] == get.headers["content-length"]
            connection.request("GET", "/health")  # no body stands before this answer
            assert connection.reply().status == 200


class TestLeaving:
    """A client that closes its connection, or its sending side, has left."""

    @pytest.mark.parametrize("version", ["1.1", "1.0"])
    def test_a_client_that_closes_is_cancelled(self, full, version):
        MARK.unlink(missing_ok=True)
        with Connection(full) as connection:
            sent = connection.head(body=body_of(HELD)) + body_of(HELD)
            connection.send(sent.replace(b"HTTP/1.1", b"HTTP/" + version.encode(), 1))
            wait_until(MARK.exists)
            assert under_way(full) == 1
        wait_until(lambda: under_way(full) == 0, seconds=5)
        MARK.unlink(missing_ok=True)

    def test_so_is_one_that_closes_its_sending_side(self, full):
        MARK.unlink(missing_ok=True)
        with Connection(full) as connection:
            connection.request(body=body_of(HELD))
            wait_until(MARK.exists)
            connection.socket.shutdown(socket.SHUT_WR)
            assert connection.closed
            wait_until(lambda: under_way(full) == 0, seconds=5)
        MARK.unlink(missing_ok=True)


def swallowed(connection, seconds):
    """Send for so long; return the number of bytes that found room."""
    connection.socket.setblocking(False)
    sent, end, piece = 0, time.monotonic() + seconds, bytes(2**16)
    while time.monotonic() < end:
        try:
            sent += connection.socket.send(piece)
        except BlockingIOError:
            time.sleep(0.001)
        except ConnectionError:
            break
    return sent


class TestTheRestOfARefusedBody:
    """It is read up to a bound: refusing it costs little, and a client that sends all before it
    reads finds the answer."""

    MOST, KERNEL = 16 * 2**20, 16 * 2**20  # --max-body-bytes; buffers of both sides

    @pytest.mark.parametrize("target", ["/none", "/v1/models", "/v1/score"])
    def test_it_is_read_up_to_a_bound(self, limited, target):
        with Connection(limited) as connection:
            connection.send(connection.head("POST", target, length=10**9, key=False))
            assert swallowed(connection, 2.5) < self.MOST + self.KERNEL

    def test_a_request_that_is_turned_away(self, busy):
        with Connection(busy) as connection:
            connection.send(connection.head("POST", "/v1/score", length=900_000))
            check_error(connection.reply(), 429, "overloaded", None)
            assert swallowed(connection, 2.5) < self.KERNEL

    @pytest.mark.parametrize(("target", "times"), [("/none", 1), ("/v1/score", 2)])
    def test_one_that_is_sent_whole_finds_its_answer(self, client, target, times):
        """The application's refusals even keep the connection."""
        with Connection(client) as connection:
            for _ in range(times):
                connection.request("POST", target, "Content-Encoding: br", body=bytes(10**7))
                assert connection.reply().status == (404 if target == "/none" else 415)

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
