"""Promise: every answer has an id, a line in the log and a count, and none of them contains
anything that a caller wrote."""

import json
from uuid import uuid4

import pytest

from support.connections import Connection, check_error, large_request
from support.serving import wait_until
from support.watched_server import (
    ALICE,
    BOB,
    BODY,
    CANARY,
    CHUNKED,
    TIMEOUT,
    bare,
    by_get,
    by_post,
    raw,
)


class TestRequestId:
    """Every answer has an id: the caller's, if it is valid, or a new one."""

    @pytest.mark.parametrize(
        "name", ["a", "A.b_c-9", "x" * 128, "..", "0bc3df5a93d744aaac339cc3d5f3c96b"]
    )
    def test_a_good_one_is_echoed(self, client, name):
        for path in ("/health", "/nowhere", "/v1/models"):
            assert client.get(path, headers={"X-Request-Id": name}).headers["x-request-id"] == name

    def test_without_one_each_request_gets_its_own(self, client):
        ids = {client.get("/health").headers["x-request-id"] for _ in range(9)}
        assert len(ids) == 9
        assert all(len(name) == 32 and int(name, 16) for name in ids)

    @pytest.mark.parametrize(
        "values",
        [[""], ["x" * 129], ["a b"], ["a/b"], ["a;b"], ["ä"], ["a\tb"], ["a", "a"]],
    )
    @pytest.mark.parametrize("path", ["/health", "/v1/models", "/nowhere"])
    def test_a_bad_one_is_refused_by_name(self, client, path, values):
        with Connection(client) as connection:
            connection.request("GET", path, *(f"X-Request-Id: {value}" for value in values))
            reply = connection.reply()
            message = check_error(reply, 400, "invalid_request", "X-Request-Id")
            assert "1 to 128" in message
            assert int(reply.headers["x-request-id"], 16), "one of the server's own"
            connection.request("GET", "/health")
            assert connection.reply().status == 200, "the connection lives on"


# id -> request, status, code, route in the log, and whether the server read the head, which holds
# the id
SCORE, NO_ROUTE = "/v1/score", "unmatched"


KINDS = {
    "not JSON": (by_post(b"{"), 400, "invalid_request", SCORE, True),
    "unknown field": (by_post(b'{"zzz":1}'), 400, "invalid_request", SCORE, True),
    "no labels": (by_post(b'{"items":["a"]}'), 400, "missing_labels", SCORE, True),
    "timeout": (by_post(X_Request_Timeout_Ms="0"), 400, "invalid_request", SCORE, True),
    "no key": (raw(key=False), 401, "invalid_api_key", SCORE, True),
    "no key, no route": (raw(key=False, path="/x"), 401, "invalid_api_key", NO_ROUTE, True),
    "no such path": (by_get("/nowhere"), 404, "not_found", NO_ROUTE, True),
    "no such model": (
        by_post(json.dumps(BODY | {"model": "x"}).encode()),
        404,
        "model_not_found",
        SCORE,
        True,
    ),
    "wrong method": (by_get("/v1/score"), 405, "method_not_allowed", SCORE, True),
    "made-up method": (by_get("/info", CANARY), 400, "invalid_request", NO_ROUTE, False),
    "slow head": (bare(b"GET /hea"), 408, "request_timeout", NO_ROUTE, False),
    "slow body": (
        raw("Content-Type: application/json", "Content-Length: 9"),
        408,
        "request_timeout",
        SCORE,
        True,
    ),
    "large body": (by_post(b" " * (2**20 + 1)), 413, "body_too_large", SCORE, True),
    "text": (by_post(content_type="text/plain"), 415, "unsupported_media_type", SCORE, True),
    "endless head": (bare(b"GET /" + b"y" * 4096), 431, "header_too_large", NO_ROUTE, False),
    "no HTTP": (bare(b"\x16\x03\r\n\r\n"), 400, "invalid_request", NO_ROUTE, False),
    "broken chunk": (raw(*CHUNKED, b"zz\r\n\r\n"), 400, "invalid_request", SCORE, True),
    "both lengths": (
        raw(*CHUNKED, "Content-Length: 0"),
        400,
        "invalid_request",
        NO_ROUTE,
        False,
    ),
    "too late": (
        by_post(large_request(200_000, apply_softmax=True), X_Request_Timeout_Ms="30"),
        504,
        "deadline_exceeded",
        SCORE,
        True,
    ),
}


@pytest.mark.parametrize(("send", "status", "code", "route", "read"), KINDS.values(), ids=KINDS)
def test_every_error_has_an_id_a_line_and_a_count(watched, send, status, code, route, read):
    before = watched.samples()
    name = f"id-{uuid4().hex}"
    reply = send(watched, name)
    check_error(reply, status, code)
    request_id = reply.headers["x-request-id"]
    assert (request_id == name) == read
    line = watched.line(request_id)
    assert (line["status"], line["code"], line["route"]) == (status, code, route)
    assert line["level"] == ("error" if status >= 500 else "info")
    after = watched.samples()
    labels = (("code", code), ("method", line["method"]), ("route", route), ("status", str(status)))
    key = ("gpuscore_requests_total", labels)
    assert after[key] - before.get(key, 0) == 1
    if code == "deadline_exceeded":
        return  # the engine may have taken it
    name, wanted = "gpuscore_rejected_total", {code: 1} if route == SCORE else {}
    assert increases(before, after, name, "reason") == wanted


def increases(before, after, name, label):
    """Return {label's value: growth} of the series of a counter that have grown."""
    series = {key: after[key] - before.get(key, 0) for key in after if key[0] == name}
    return {dict(labels)[label]: value for (_, labels), value in series.items() if value}


def test_a_client_that_leaves_is_noted(watched):
    name, before = uuid4().hex, watched.samples()
    with Connection(watched.client) as connection:
        body = large_request(300_000, apply_softmax=True)
        connection.request("POST", "/v1/score", f"X-Request-Id: {name}", body=body)
        wait_until(lambda: watched.samples()["gpuscore_requests_waiting", ()] == 1)
    assert (watched.line(name)["status"], watched.line(name)["code"]) == (499, "client_left")
    with Connection(watched.client) as connection:
        arriving = f"X-Request-Id: {name}-arriving"
        connection.request("POST", "/v1/score", arriving, body=b"{", length=9)
    assert watched.line(f"{name}-arriving")["code"] == "client_left"
    grown = increases(before, watched.samples(), "gpuscore_cancelled_total", "stage")
    assert grown == {"engine": 1, "receive": 1}


class TestCanary:
    """The log, metrics and spans contain nothing that a caller wrote."""

    REQUESTS = {
        "text": {"json": {"query": CANARY, "items": [CANARY], "label_token_ids": [3]}},
        "labels": {"json": {"items": [f"{CANARY} a"], "labels": [CANARY]}},
        "model": {"json": BODY | {"model": CANARY}},
        "salt": {"json": BODY | {"cache_salt": CANARY}},
        "bad salt": {"json": BODY | {"cache_salt": f"{CANARY} {CANARY}"}},
        "unknown field": {"json": BODY | {CANARY.replace("-", "_"): 1}},
        "unknown field, bad": {"json": BODY | {f"<{CANARY}>": CANARY}},
        "no JSON": {"content": CANARY.encode(), "headers": {"content-type": "application/json"}},
        "content type": {"content": b"{}", "headers": {"content-type": f"text/{CANARY}"}},
        "bad id": {"json": BODY, "headers": {"X-Request-Id": f"{CANARY}!"}},
        "timeout": {"json": BODY, "headers": {TIMEOUT: CANARY}},
        "trace": {"json": BODY, "headers": {"traceparent": CANARY, "tracestate": f"a={CANARY}"}},
        "other fields": {"json": BODY, "headers": {"User-Agent": CANARY, f"X-{CANARY}": CANARY}},
        "key": {"json": BODY, "headers": {"Authorization": f"Bearer {CANARY}"}},
        "path": {"method": "GET", "url": f"/{CANARY}"},
        "query string": {"json": BODY, "url": f"/v1/score?{CANARY}={CANARY}"},
        "method": {"method": CANARY},
        "host": {"json": BODY, "headers": {"Host": CANARY}},
        "not finite": {"json": {"items": [CANARY * 1000], "label_token_ids": [3]}},
    }

    def test_texts_of_requests_are_in_no_log_metric_or_span(self, watched):
        for request in self.REQUESTS.values():
            reply = watched.client.request(**({"method": "POST", "url": "/v1/score"} | request))
            watched.line(reply.headers["x-request-id"])
        for sent in (CANARY, f"GET /{CANARY}\r\n\r\n", f"GET / HTTP/1.1\r\n{CANARY} : x\r\n\r\n"):
            bare(sent.encode())(watched, "")
        last = by_get("/info")(watched, f"last-{uuid4().hex}").headers["x-request-id"]
        watched.line(last)
        wait_until(lambda: last.encode() in b"".join(watched.traces), 5)
        metrics = watched.client.get("/metrics").text
        everything = watched.log.read_bytes() + b"".join(watched.traces) + metrics.encode()
        everything = everything.lower()
        for secret in (CANARY, CANARY.replace("-", "_"), ALICE, BOB):
            assert secret.lower().encode() not in everything

    def test_labels_are_few(self, watched):
        """A made-up method, path or id adds no series."""
        for number in range(3):
            watched.client.request(f"METHOD{number}", f"/path/{number}")
        before = set(watched.samples())
        for number in range(3, 30):
            watched.client.request(f"METHOD{number}", f"/path/{number}")
        assert set(watched.samples()) == before
