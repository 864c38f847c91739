"""Promise: SageMaker's batch transform may send several bodies in one request, one a line; the
answers are lines in the same order, and an error names the line."""

import json

import pytest

from support.connections import check_error, connected, same_answer
from support.serving import QUICK, serving

SCORE = {"query": "item: ", "items": ["a", "b c"], "labels": ["yes", "no"], "apply_softmax": True}
RERANK = {"query": "a blue chair", "documents": ["A red lamp.", "A chair in blue.", "A scarf."]}
CLASSIFY = {"input": ["a lamp"], "labels": ["yes", "no"]}
BODIES = {"/v1/score": SCORE, "/rerank": RERANK, "/v1/classify": CLASSIFY}


@pytest.fixture(scope="module")
def client():
    flags = ("--max-items", "500", "--max-body-bytes", "1048576", "--max-queued-requests", "200")
    with (
        serving("demo", *QUICK, "--routes", "sagemaker", "--host", "127.0.0.1", *flags) as server,
        connected(server) as opened,
    ):
        yield opened


def told(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()


def post_lines(client, *lines, end=b"\n", **headers):
    data = b"\n".join(
        line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines
    )
    kind = {"Content-Type": "application/jsonlines"} | headers
    return client.post("/invocations", content=data + end, headers=kind)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_every_line_is_answered(client, end):
    alone = [told(client.post(path, json=body)) for path, body in BODIES.items()]
    reply = post_lines(client, *BODIES.values(), end=end)
    assert reply.headers["content-type"] == "application/jsonlines"
    assert reply.status_code == 200, reply.text
    same_answer([json.loads(line) for line in reply.text.split("\n")], alone)


def test_more_lines_than_the_queue_has_room_for(client):
    """Each is a request to the engine, but only some of them are in its queue at once."""
    lines = [{"query": f"item {i}: ", "items": ["a"], "labels": ["yes"]} for i in range(500)]
    answers = [json.loads(line) for line in post_lines(client, *lines).text.splitlines()]
    assert len(answers) == 500
    for place in (0, 127, 128, 499):
        same_answer(answers[place], told(client.post("/v1/score", json=lines[place])))


@pytest.mark.parametrize(
    ("lines", "code", "message", "param"),
    [
        ([SCORE, {"items": 3}], "invalid_request", "line 2: ", "line 2.items"),
        ([SCORE, {"itms": []}, SCORE], "invalid_request", "line 2: ", "line 2.itms"),
        ([SCORE, SCORE, b"{"], "invalid_request", "line 3: ", "line 3"),
        ([SCORE, b"", SCORE], "invalid_request", "line 2: ", "line 2"),
        ([b"\xff"], "invalid_request", "line 1: ", "line 1"),
        ([b""], "invalid_request", "line 1: ", "line 1"),
        ([SCORE, {"items": ["a"], "labels": []}], "empty_labels", "line 2: ", "line 2.labels"),
        ([b"{}"] * 1025, "too_many_items", "1025 lines, the limit is 1024", None),
        ([SCORE | {"items": ["a"] * 300}] * 2, "too_many_items", "600 items, the limit", None),
        ([SCORE, SCORE | {"model": "demo"}], "invalid_request", "all bodies", "model"),
        ([SCORE, SCORE | {"cache_salt": "x"}], "invalid_request", "all bodies", "cache_salt"),
    ],
)
def test_a_bad_line_is_named(client, lines, code, message, param):
    reply = post_lines(client, *lines)
    assert check_error(reply, 400, code).startswith(message)
    assert reply.json()["error"]["param"] == param


def test_lines_keep_deadline_type_and_size(client):
    late = post_lines(
        client, *[SCORE | {"query": "a " * 200}] * 400, **{"X-Request-Timeout-Ms": "1"}
    )
    check_error(late, 504, "deadline_exceeded")
    check_error(post_lines(client, b" " * 2**20), 413, "body_too_large")
    check_error(
        post_lines(client, SCORE, **{"X-Amzn-SageMaker-Custom-Attributes": "/v1/score"}),
        415,
        "unsupported_media_type",
    )
    kind = {"Content-Type": "application/jsonlines"}
    check_error(
        client.post("/v1/score", content=b"{}", headers=kind), 415, "unsupported_media_type"
    )
