"""Promise: an answer's size is known before it is computed, and a large answer is made in pieces
that are together what one encoding of it would be."""

import json
import random
import re
import signal
import socket
import time

import msgspec
import pytest

from gpuscore.dialects.answers import (
    ClassifyAnswer,
    CompletionAnswer,
    DetokenizeAnswer,
    PairsAnswer,
    RankedText,
    RerankAnswer,
    ScoreAnswer,
    TokenizeAnswer,
)
from gpuscore.dialects.dialect import list_json, text_bytes, text_json
from gpuscore.dialects.paths import GENERATING_PATHS, TEXT_RANKING_PATH
from gpuscore.dialects.table import DIALECT_OF, DIALECTS
from support.connections import Connection, check_error, connected
from support.error_table import covers
from support.serving import SMALL, serving, wait_until
from support.tape_engine import HELD, MARK
from support.tape_servers import body_of, let_go, tape_server
from support.wire import ANSWERED, LARGE, ODD

KINDS = {  # path -> the type of its answers
    "/v1/score": ScoreAnswer,
    "/v1/classify": ClassifyAnswer,
    "/rerank": RerankAnswer,
    "/v1/rerank": RerankAnswer,
    "/v1/completions": CompletionAnswer,
    "/tokenize": TokenizeAnswer,
    "/detokenize": DetokenizeAnswer,
}


@pytest.fixture(scope="module")
def refusing():
    """A client of the demo model, on a server whose answers may have one byte."""
    with (
        serving("demo", *SMALL, "--max-answer-bytes", "1") as running,
        connected(running) as client,
    ):
        yield client


@pytest.mark.parametrize("name", ANSWERED)
def test_pieces_are_one_encoding_within_the_bound(demo, refusing, name):
    path, body = ANSWERED[name]
    kind = PairsAnswer if "queries" in body else KINDS.get(path)
    kind = list[RankedText] if "texts" in body.get("inputs", body) else kind
    reply = demo.post(path, json=body)
    assert reply.status_code == 200, reply.text
    answer = reply.content
    assert msgspec.json.encode(msgspec.json.decode(answer, type=kind)) == answer
    told = refusing.post(path, json=body).json()["error"]
    told = told if isinstance(told, str) else told["message"]  # TEI's, or ours
    most = int(re.match(r"the answer may have (\d+) bytes", told)[1])
    assert len(answer) <= most <= 8 * len(answer) + 4096, (len(answer), most)


def test_every_dialect_is_tried():
    tried = {path for path, _ in ANSWERED.values()}
    assert all(
        tried & {*dialect.paths} for dialect in DIALECTS if dialect.paths != GENERATING_PATHS
    )


@covers("answer_too_large")
@pytest.mark.parametrize("path", sorted({*DIALECT_OF} - {*GENERATING_PATHS, TEXT_RANKING_PATH}))
def test_a_large_answer_is_refused(refusing, path):
    reply = refusing.post(path, json=DIALECT_OF[path].example)
    message = check_error(reply, 400, "answer_too_large", None)
    assert re.fullmatch(r"the answer may have \d+ bytes, the limit is 1", message)


@pytest.mark.parametrize("path", ["/rerank", TEXT_RANKING_PATH])
def test_a_large_answer_is_refused_in_teis_shape(refusing, path):
    body = {"query": "q", "texts": ["a"]}
    reply = refusing.post(path, json={"inputs": body} if path == TEXT_RANKING_PATH else body)
    assert (reply.status_code, reply.json()["error_type"]) == (400, "Validation")
    assert "the limit is 1" in reply.json()["error"]


def test_pieces_of_lists_and_texts():
    rng = random.Random(7)
    for size in (0, 1, 2, 5, 511, 512, 513):
        rows = [[rng.random()] * rng.randrange(3) for _ in range(size)]
        text = "".join(rng.choice(ODD) for _ in range(size * 300))
        for step in (1, 2, 512):
            assert b"".join(list_json(rows, step)) == msgspec.json.encode(rows)
        assert b"".join(text_json(text, "", text)) == msgspec.json.encode(text + text)
        assert len(msgspec.json.encode(text)) <= text_bytes(text)


def large_body():
    return json.dumps(LARGE[1]).encode()


def test_a_large_answer_keeps_the_connection(demo):
    with Connection(demo, timeout=60) as connection:
        for _ in range(2):
            connection.request(body=large_body())
            reply = connection.reply()
            assert (reply.status, int(reply.headers["content-length"])) == (200, len(reply.body))
            assert "connection" not in reply.headers
            assert len(json.loads(reply.body)["scores"]) == 700
        connection.request("GET", "/health")
        assert connection.reply().status == 200


def test_http_1_0_ends_a_large_answer_by_closing(demo):
    with Connection(demo, timeout=60) as connection:
        head = connection.head(body=large_body()).replace(b"HTTP/1.1", b"HTTP/1.0")
        connection.send(head + large_body())
        data = b""
        while part := connection.socket.recv(2**16):
            data += part
    head, body = data.split(b"\r\n\r\n", 1)
    assert b"chunked" not in head
    assert b"content-length: %d" % len(body) in head.lower()
    assert b"connection: close" in head.lower()
    assert len(json.loads(body)["scores"]) == 700


def test_answers_count_with_the_bodies():
    """While a request is computed, the most bytes of its answer count as taken; then they are
    free."""
    wide = {"items": [[1]] * 400, "label_token_ids": [*range(100)]}  # a million bytes at most
    with tape_server(server={"max_queued_bytes": 1_000_000}) as (_, client):
        assert client.post("/v1/score", json=wide).status_code == 200  # alone
        with Connection(client) as held:
            MARK.unlink(missing_ok=True)
            held.request(body=body_of(HELD))
            wait_until(MARK.exists)
            message = check_error(client.post("/v1/score", json=wide), 429, "overloaded", None)
            assert re.search(r"bodies and answers of \d{4} bytes are in flight", message)
            assert let_go(held).status == 200
        assert client.post("/v1/score", json=wide).status_code == 200


def test_a_slow_reader_counts_until_it_leaves():
    wide = json.dumps({"items": [[1]] * 9000, "label_token_ids": [*range(100)]}).encode()
    other = {"items": [[1]] * 400, "label_token_ids": [*range(100)]}
    with tape_server(server={"max_queued_bytes": 23_000_000}) as (_, client):
        with Connection(client) as slow:
            slow.request(body=wide)
            slow.socket.recv(1)
            time.sleep(0.2)
            check_error(client.post("/v1/score", json=other), 429, "overloaded", None)
        wait_until(lambda: client.post("/v1/score", json=other).status_code == 200)


def test_the_bytes_of_a_large_answer_are_recorded(watched):
    path, body = LARGE
    reply = watched.client.post(path, json=body)
    assert reply.status_code == 200
    line = watched.line(reply.headers["x-request-id"])
    assert line["bytes_out"] == len(reply.content) > 10**6


def test_a_large_answer_that_is_being_sent_is_finished_before_the_server_ends():
    wide = json.dumps({"items": [[1]] * 9000, "label_token_ids": [*range(100)]}).encode()
    with tape_server() as (server, client), Connection(client, timeout=60) as slow:
        slow.request(body=wide)
        slow.socket.recv(1, socket.MSG_PEEK)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.process.poll() is None
        assert len(json.loads(slow.reply().body)["scores"]) == 9000
        assert server.process.wait(timeout=30) == 0
