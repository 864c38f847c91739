"""Promise: slow clients, late answers, scores that are not finite and our own bugs have answers.

Afterwards both servers still answer the canary request as they did at the start.
"""

import asyncio
import json
import re
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from gpuscore.dialects.served import ModelTable, ServedModel
from gpuscore.errors import DeadlineExceeded
from gpuscore.server.service import ScoringService
from gpuscore.types.batch import NO_TOKENS
from gpuscore.types.record import RequestRecord
from gpuscore.types.request import ScoreRequest
from support.connections import (
    KEYS,
    MARKER,
    POISON,
    Connection,
    canary,
    check_error,
    large_request,
    post,
    retry_after,
    score,
)
from support.error_table import GOOD, covers
from support.serving import sockets_of, wait_until
from support.slow import slow
from support.stub_service import ask, loaded, stub_service

pytestmark = pytest.mark.usefixtures("unharmed")

POST = {"method": "POST", "url": "/v1/score", "json": GOOD}
URGENT = {"items": [[5]], "label_token_ids": [3], "apply_softmax": True, "priority": -1}


def peers(server):
    """Return the ports to which the server's process has open connections, from /proc."""
    sockets = sockets_of(server.process.pid)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[2].rpartition(":")[2], 16) for row in rows if row[9] in sockets}


class TestTimes:
    """The limited server allows a second for a head, and another for a body."""

    HEAD = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\n"
    JSON = b"Content-Type: application/json\r\n"
    OTHER = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

    @covers("request_timeout")
    def test_heads_and_bodies_that_do_not_end(self, limited):
        """The deadline is for the whole; further bytes do not extend it."""
        key = f"X-Api-Key: {KEYS[0]}\r\n".encode()
        sized = self.HEAD + key + self.JSON + b"Content-Length: 100\r\n\r\n"
        chunked = self.HEAD + key + self.JSON + b"Transfer-Encoding: chunked\r\n\r\n"
        begun = {  # what is sent at first -> what then comes now and then
            b"": (b"", b"\r\n"),
            b"POST /v1/sc": (b"",),
            self.OTHER + b"GET /hea": (b"",),  # the second head of a connection
            self.HEAD + b"X-A: ": (b"", b"y"),
            sized: (b"", b" "),
            sized + b'{"items":[': (b"",),
            chunked: (b"", b"1\r\n \r\n"),
            chunked + b"0\r\nX-Sum: ": (b"y",),
        }
        with ExitStack() as opened:
            sent = []
            for first, drops in begun.items():
                for drop in drops:
                    sent.append((opened.enter_context(Connection(limited)), drop))
                    sent[-1][0].send(first)
                    if first.startswith(self.OTHER):
                        assert sent[-1][0].reply().status == 200
            start = time.monotonic()
            while time.monotonic() - start < 5 and any(c.silent for c, _ in sent):
                for connection, drop in sent:
                    if connection.silent:
                        connection.send(drop)
                time.sleep(0.05)
            for connection, _ in sent:
                check_error(connection.reply(), 408, "request_timeout", None)
                assert connection.closed
        assert 0.9 < time.monotonic() - start < 5

    @pytest.mark.parametrize("keep_alive", [False, *slow(True)])
    def test_an_answer_that_nobody_takes(self, limited_server, limited, keep_alive):
        """The request counts as in flight until the server gives up its connection and the unsent
        answer."""
        body = {"items": [[5 + i % 9] for i in range(10_000)], "apply_softmax": True}
        raw = json.dumps(body | {"label_token_ids": list(range(8, 128))}).encode()
        fields = () if keep_alive else ("Connection: close",)
        with Connection(limited) as connection:
            connection.request("POST", "/v1/score", *fields, body=raw)
            wait_until(lambda: not connection.silent, seconds=60)
            check_error(score(limited, **URGENT), 429, "overloaded")
            ours = connection.socket.getsockname()[1]
            wait_until(lambda: ours not in peers(limited_server), seconds=30)
            received = b""
            with suppress(ConnectionError):
                while part := connection.socket.recv(2**20):
                    received += part
        head, _, rest = received.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])
        assert len(rest) < length, "the client's memory took all of it"
        assert score(limited, **URGENT).status_code == 200

    @covers("deadline_exceeded")
    def test_an_answer_that_takes_too_long(self, client):
        before = canary(client)
        start = time.monotonic()
        reply = post(client, large_request(1_000_000), x_request_timeout_ms="400")
        check_error(reply, 504, "deadline_exceeded", None)
        assert canary(client) == before, "the work of the expired request is dropped"
        assert time.monotonic() - start < 5


class TestBugs:
    @covers("nonfinite_score")
    def test_a_score_that_is_not_finite(self, limited):
        body = {"items": [[5], [6], [8]], "apply_softmax": True}
        labels = [[3, 17], [3, POISON], [3]]
        reply = score(limited, **body, label_token_ids=labels)
        check_error(reply, 500, "nonfinite_score", "items[1]")
        rest = {"items": [None, *body["items"]], "on_error": "null"}
        reply = score(limited, **(body | rest), label_token_ids=[[3], *labels])
        check_error(reply, 500, "nonfinite_score", "items[2]")
        assert score(limited, **body, label_token_ids=[3, 17]).status_code == 200
        reply = score(limited, items=["a"], labels=["y"])  # all labels, POISON among them
        check_error(reply, 500, "nonfinite_score", "items[0]")

    @covers("internal_error")
    def test_a_bug(self, caplog):
        class BrokenTable(ModelTable):
            def choose(self, wanted):
                raise KeyError(MARKER)

        service = ScoringService([ServedModel("tiny")], 1)
        service.models = BrokenTable(list(service.models))
        (reply,) = ask(service, POST)
        message = check_error(reply, 500, "internal_error", None)
        assert message == "internal error"
        assert "unhandled error" in caplog.text

    @covers("unavailable")
    def test_before_the_model_is_there(self):
        ready, health = ({"method": "GET", "url": path} for path in ("/ready", "/health"))
        *refused, alive = ask(ScoringService([ServedModel("tiny")]), ready, POST, health)
        for reply in refused:
            check_error(reply, 503, "unavailable", None)
            assert retry_after(reply) >= 1
        assert alive.status_code == 200, "only not ready"

    def test_a_time_that_is_over_before_the_engine_is_asked(self):
        """It is over while texts are tokenised; 504, not 429 with a time to wait."""
        ids = (np.array([3], np.int32),)
        late = ScoreRequest(NO_TOKENS, ids, ids, True, deadline=time.monotonic() - 0.001)
        service = stub_service()  # whose engine's rate is known, so that waits are foretold
        with pytest.raises(DeadlineExceeded):
            asyncio.run(service.run(loaded(service), late, RequestRecord("a")))
