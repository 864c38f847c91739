"""Promise: an overloaded server refuses a request as soon as its head is read, and keeps the
connection in step."""

import pytest

from support.connections import (
    Connection,
    check_error,
    connected,
    metric,
    retry_after,
    under_way,
)
from support.error_table import covers
from support.serving import wait_until
from support.tape_engine import HELD, MARK, SLOW
from support.tape_servers import JSON, body_of, in_flight, let_go, tape_server

ANSWER = 2105  # bytes that the answer to one item with one label has at most
SCORE = ("POST", "/v1/score")


def refused(connection, reason="1 requests with 1 tokens are in flight"):
    reply = connection.reply()
    assert reason in check_error(reply, 429, "overloaded", None)
    assert 1 <= retry_after(reply) <= 30
    assert len(reply.headers["x-request-id"]) > 0
    return reply


def test_a_request_is_refused_at_its_head(busy):
    """The answer arrives before the body; after the body the connection serves further requests."""
    body, before = body_of(1, 2), counted(busy)
    with Connection(busy) as connection:
        for _ in range(2):
            connection.send(connection.head(*SCORE, "X-Request-Id: it-is-me", body=body))
            reply = refused(connection)
            assert reply.headers["x-request-id"] == "it-is-me"
            assert "connection" not in reply.headers
            connection.send(body)
        connection.request("GET", "/health")
        assert connection.reply().status == 200
    assert counted(busy) - before == 2


def counted(client):
    """Return how many requests /metrics has counted as refused."""
    lines = client.get("/metrics").text.splitlines()
    refusals = [line for line in lines if 'status="429"' in line and "requests_total{" in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in refusals)


def test_pipelines(busy):
    """Each request has its own answer, and those before rubbish are answered, too."""
    body = body_of(1, 2)
    with Connection(busy) as connection:
        request = connection.head(body=body) + body
        connection.send(request * 3 + connection.head("GET", "/health") + b"\x16\x03\x01\r\n\r\n")
        for _ in range(3):
            refused(connection)
        assert [connection.reply().status for _ in range(2)] == [200, 400]
        assert connection.closed


@pytest.mark.parametrize(
    ("fields", "length"),
    [((), 2**16 + 1), (("Transfer-Encoding: chunked",), None), (("Expect: 100-continue",), 9)],
    ids=["large", "chunked", "asks first"],
)
def test_a_body_that_is_not_worth_reading(busy, fields, length):
    with Connection(busy) as connection:
        connection.request(*SCORE, *fields, length=length)
        assert refused(connection).headers["connection"] == "close"
        assert connection.closed


def test_other_answers_go_first(busy):
    with Connection(busy) as connection:
        connection.request(*SCORE, "X-Request-Id: no id", body=body_of(1))
        check_error(connection.reply(), 400, "invalid_request", "X-Request-Id")
        for path, status in (("/ready", 200), ("/metrics", 200), ("/v1/score", 405)):
            connection.request("GET", path)
            assert connection.reply().status == status


def test_the_place_of_a_client_that_left_is_free(full):
    """The room is free at once, although the engine still computes the batch."""
    with in_flight(full, HELD) as held:
        held.close()
        wait_until(lambda: under_way(full) == 0)
        with in_flight(full, 1) as other:
            assert other.silent
            assert let_go(other).status == 200


def test_a_body_that_comes_too_late(full):
    """The gate admits the request at its head, but there is no room when its body is complete."""
    body = body_of(1, 2)
    with Connection(full) as connection:
        connection.send(connection.head(body=body) + body[:3])
        with in_flight(full, HELD):
            connection.send(body[3:])
            refused(connection)
            connection.request("GET", "/health")
            assert connection.reply().status == 200


@pytest.fixture(scope="module")
def narrow():
    """A client of a server that accepts few items and bytes."""
    limits = {"server": {"max_queued_bytes": 100_000}, "engine": {"max_queued_items": 3}}
    with tape_server(**limits) as (_, client):
        yield client


def test_bodies_in_memory(narrow):
    large = body_of(HELD).ljust(60_000 - ANSWER)
    assert narrow.post("/v1/score", content=body_of(1).ljust(10**6), headers=JSON).is_success
    with Connection(narrow) as held, Connection(narrow) as other, Connection(narrow) as third:
        MARK.unlink(missing_ok=True)
        held.request(body=large)
        wait_until(MARK.exists)
        other.send(other.head(length=40_001))
        refused(other, "bodies and answers of 60000 bytes are in flight, the limit is 100000 bytes")
        third.send(third.head(length=40_000) + b" " * 20_000)  # there is room for it ...
        chunked = ("Content-Type: application/json", "Transfer-Encoding: chunked")
        with Connection(narrow) as fourth:
            fourth.send(fourth.head(*SCORE, *chunked) + b"8000\r\n" + b" " * 0x8000 + b"\r\n")
            refused(fourth, "the limit is 100000")  # ... but not for the body that came later
        assert third.silent
        assert let_go(held).status == 200


def test_items_in_flight(narrow):
    body = {"items": [[1], [2], [3]], "label_token_ids": [3]}
    with in_flight(narrow, HELD) as held:
        reply = narrow.post("/v1/score", json=body)
        message = check_error(reply, 429, "overloaded", None)
        assert "with 1 items; the limit is 3 items" in message
        assert let_go(held).status == 200
    assert narrow.post("/v1/score", json=body).status_code == 200


def test_a_long_wait():
    """The child has measured a few tokens per second, so 400 tokens mean a long wait. A batch of
    one token says nothing about speed."""
    limits = {"max_queue_seconds": 2.0}
    with tape_server(server=limits, factory="of_small_batches") as (_, client):
        assert client.post("/v1/score", content=body_of(SLOW), headers=JSON).status_code == 200
        wait_until(lambda: metric(client, "tokens_per_second") > 0)
        assert metric(client, "capacity_tokens_per_second") == 0
        with in_flight(client, HELD, *[1] * 11) as held, Connection(client) as connection:
            connection.request(body=body_of(1))
            assert let_go(held).status == 200
            assert connection.reply().status == 200
        slow = body_of(SLOW, *[1] * 20)
        assert client.post("/v1/score", content=slow, headers=JSON).status_code == 200
        wait_until(lambda: 0 < metric(client, "capacity_tokens_per_second") < 100)
        with in_flight(client, HELD, *[1] * 400) as held:
            with Connection(client) as connection:
                connection.send(connection.head(body=b" " * 4000))
                refused(connection, "a wait of about")
            assert let_go(held).status == 200


@covers("overloaded")
def test_requests_of_one_key(tmp_path):
    """Those of another key are not concerned."""
    (tmp_path / "keys").write_text("alice\nbob\n")
    limits = {"max_inflight_per_key": 1, "api_key_file": str(tmp_path / "keys")}
    with tape_server(server=limits) as (server, _), connected(server, "alice") as alice:
        body = body_of(1, 2)
        with Connection(alice) as late, Connection(alice) as other:
            late.send(late.head(body=body) + body[:3])
            with in_flight(alice, HELD) as held:
                other.send(other.head(length=9))
                late.send(body[3:])
                for connection in (other, late):
                    refused(connection, "1 requests of this API key are in flight")
                with connected(server, "bob") as bob, in_flight(bob, 1) as third:
                    assert third.silent, "it waits for the engine"
                    assert let_go(held).status == third.reply().status == 200
        assert alice.post("/v1/score", content=body_of(1), headers=JSON).status_code == 200
