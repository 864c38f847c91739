"""Promise: the engine learns each request's deadline and tenant."""

import json
import time

import pytest

from gpuscore.config import ServerConfig
from gpuscore.dialects.decoding import engine_salt
from support.connections import check_error
from support.stub_service import ask, loaded, stub_service
from support.watched_server import ALICE, BOB, BODY, TIMEOUT


class TestDeadline:
    @pytest.mark.parametrize(
        "text", ["0", "-1", "+5", "1.5", "1e3", "", "x", "20001", "9" * 5000, "٧", "5,5"]
    )
    def test_a_header_that_is_none_is_refused_by_name(self, watched, text):
        sent = [(TIMEOUT, text[:1500].encode()), ("Content-Type", "application/json")]
        reply = watched.client.post("/v1/score", content=json.dumps(BODY), headers=sent)
        message = check_error(reply, 400, "invalid_request", TIMEOUT)
        assert "from 1 to 20000" in message

    def test_given_twice(self, watched):
        reply = watched.client.post(
            "/v1/score", json=BODY, headers=[(TIMEOUT, "9"), (TIMEOUT, "9")]
        )
        check_error(reply, 400, "invalid_request", TIMEOUT)

    @pytest.mark.parametrize("text", ["20000", "5000", "007000"])
    def test_enough_time(self, watched, text):
        reply = watched.client.post("/v1/score", json=BODY, headers={TIMEOUT: text})
        assert reply.status_code == 200

    @pytest.mark.parametrize(
        ("headers", "options", "seconds"),
        [({}, {}, 120), ({}, {"request_timeout": 7.5}, 7.5), ({TIMEOUT: "500"}, {}, 0.5)],
    )
    def test_the_engine_is_told(self, headers, options, seconds):
        service = stub_service()
        start = time.monotonic()
        request = {"method": "POST", "url": "/v1/score", "json": BODY, "headers": headers}
        (reply,) = ask(service, request, config=ServerConfig(**options))
        assert reply.status_code == 200
        (got,) = loaded(service).engine.requests
        assert start + seconds <= got.deadline <= time.monotonic() + seconds


class TestSalt:
    """Prefixes are shared only within one API key and, for it, one salt."""

    def test_the_engine_is_told(self):
        service = stub_service()
        bodies = [BODY, BODY | {"cache_salt": "s"}]
        requests = [
            {"method": "POST", "url": "/v1/score", "json": body, "headers": {"Authorization": key}}
            for key in (f"Bearer {ALICE}", f"Bearer {BOB}")
            for body in (*bodies, *bodies)
        ]
        replies = ask(service, *requests, keys=[ALICE.encode(), BOB.encode()])
        assert {reply.status_code for reply in replies} == {200}
        salts = [request.salt for request in loaded(service).engine.requests]
        assert salts[0:2] == salts[2:4]
        assert salts[4:6] == salts[6:8]
        assert len(set(salts)) == 4

    def test_no_pair_looks_like_another(self):
        pairs = [("a", None), ("a", "b"), ("ab", None), ("b", "a"), ("no-key", None)]
        assert len({engine_salt(*pair) for pair in pairs}) == len(pairs)
        assert "b" * 20 not in engine_salt("a", "b" * 20)
