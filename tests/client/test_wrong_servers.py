"""Promise: both clients retry what may succeed, with growing waits and within the deadline, and
raise everything else at once. A server that misbehaves costs a caller neither memory nor time nor
its terminal: answers are limited, deadlines hold, shapes are checked, errors hold plain text."""

import gzip
import json
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import chain, repeat

import pytest

from client.conftest import WHOLE
from gpuscore.client import BadAnswer, Client, ClientError, ConnectionFailed, StatusError
from gpuscore.client.calls import MOST_VALUES
from gpuscore.client.errors import LONGEST_TEXT, REQUEST_ID
from gpuscore.client.options import MAX_ANSWER_BYTES
from gpuscore.client.retries import FIRST_BACKOFF, LONGEST_BACKOFF, Attempts, Policy, Reply
from gpuscore.types import record
from support.raw_server import NAME, answering, slowly
from support.scripted_server import Step, refusal, scripted

GOOD = Step(200, WHOLE | {"scores": [[0.5]]})
BUSY = refusal(429, "overloaded", Retry_After="1")


def score(call, server, client=None, items=("a",), **options):
    return call(server.url, "score", "q", list(items), client=client, labels=["yes"], **options)


@pytest.mark.parametrize(
    ("first", "wait"),
    [
        (BUSY, 1.0),
        (refusal(503, "unavailable", Retry_After="0"), 0.0),
        (refusal(503, "insufficient_memory"), 0.0),
        (Step(502, "<html>bad gateway</html>"), 0.0),
        (Step(close=True), 0.0),
    ],
    ids=["429", "503", "503 without a time", "502", "closed"],
)
def test_temporary_failures_are_retried(call, first, wait):
    with scripted([first, GOOD]) as server:
        start = time.monotonic()
        answer = score(call, server, request_id="r")
        assert wait <= time.monotonic() - start < wait + 1.5
    assert answer.scores.tolist() == [[0.5]]
    assert [fields["x-request-id"] for fields, _ in server.requests] == ["r", "r"]
    assert server.requests[0][1] == server.requests[1][1]


@pytest.mark.parametrize("status", [400, 401, 408, 413, 500, 504])
def test_permanent_failures_are_not_retried(call, status):
    with scripted([refusal(status, "code"), GOOD]) as server:
        with pytest.raises(StatusError) as caught:
            score(call, server)
        assert (caught.value.status, caught.value.code) == (status, "code")
        assert len(server.requests) == 1


def test_attempts_are_counted(call):
    with scripted([refusal(429, "overloaded", Retry_After="0")]) as server:
        with pytest.raises(StatusError) as caught:
            score(call, server, client={"max_attempts": 3})
        assert len(server.requests) == 3
    assert (caught.value.status, caught.value.retry_after) == (429, 0.0)


def test_no_wait_beyond_the_deadline(call):
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    for step in (
        refusal(429, "overloaded", Retry_After="60"),
        Step(503, "", {"Retry-After": date}),
    ):
        with scripted([step, GOOD]) as server:
            start = time.monotonic()
            with pytest.raises(StatusError) as caught:
                score(call, server, client={"deadline": 30})
            assert time.monotonic() - start < 5
            assert caught.value.retry_after == pytest.approx(60 if step.status == 429 else 89, 0.05)
            assert len(server.requests) == 1


def test_no_answer_in_time(call):
    with scripted([Step(seconds=1.5)]) as server:
        start = time.monotonic()
        with pytest.raises(ConnectionFailed) as caught:
            score(call, server, client={"deadline": 0.3})
        assert time.monotonic() - start < 1.2
    assert "ReadTimeout" in str(caught.value)
    assert len(server.requests) == 1


def test_the_time_left_goes_out(call):
    with scripted([Step(503, "", seconds=0.3), GOOD]) as server:
        score(call, server, client={"timeout": 20, "deadline": 10})
        first, second = (int(f["x-request-timeout-ms"]) for f, _ in server.requests)
        assert 9000 < first <= 10000
        assert 7000 < second <= first - 300
        score(call, server)
        assert "x-request-timeout-ms" not in server.requests[-1][0], "the server's own limit"


def test_one_failure_ends_all_of_a_call(call):
    """The error is raised at once, although other parts wait for their next attempt."""

    def script(body):
        return {"busy": refusal(429, "overloaded", Retry_After="30"), "bad": Step(400, "no")}.get(
            body["items"][0], GOOD
        )

    with scripted(script) as server:
        start = time.monotonic()
        client = {"max_items_per_request": 1, "max_concurrent_requests": 2}
        with pytest.raises(StatusError) as caught:
            score(
                call, server, client, items=["busy", "good", "bad", *["good"] * 50], request_id="r"
            )
        assert time.monotonic() - start < 10
    assert (caught.value.status, caught.value.request_id) == (400, "r-2")
    assert len(server.requests) < 20


def test_requests_at_a_time_are_bounded(call):
    with scripted(lambda body: Step(200, GOOD.body, seconds=0.03)) as server:
        client = {"max_items_per_request": 1, "max_concurrent_requests": 3}
        assert score(call, server, client, items="abcdefghijkl").scores.shape == (12, 1)
        assert 1 < server.most <= 3


def test_backoff_grows_and_is_jittered():
    """No server is needed: the core computes the wait."""
    refused = Reply(503, {}, b"", "r")
    for attempts in (1, 2, 5, 30):
        waits = []
        for _ in range(50):
            call = Attempts(Policy(None, 1e6, 100), "r", 1e6)
            for _ in range(attempts):
                call.begin(0.0)
            waits.append(call.answered(refused, 0.0))
        longest = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** (attempts - 1))
        assert 0 <= min(waits) < 0.3 * longest
        assert 0.7 * longest < max(waits) <= longest
        assert len(set(waits)) == 50


MB = 2**20
CHUNK = b"10000\r\n" + b" " * 2**16 + b"\r\n"
ZEROS = gzip.compress(bytes(64 * MB))
OPTIONS = {"max_answer_bytes": MB}


def head(*fields, status="200 OK"):
    lines = [f"HTTP/1.1 {status}", *fields, "", ""]
    return "\r\n".join(lines).encode()


ENDLESS = {
    "chunks": lambda: chain([head("Transfer-Encoding: chunked")], repeat(CHUNK)),
    "until the end": lambda: chain([head()], repeat(bytes(2**16))),
    "a length": lambda: chain([head(f"Content-Length: {2**50}")], repeat(bytes(2**16))),
    "gzip": lambda: chain(
        [head("Transfer-Encoding: chunked", "Content-Encoding: gzip")],
        repeat(b"%x\r\n%b\r\n" % (len(ZEROS), ZEROS)),
    ),
    "an error": lambda: chain([head(status="500 No")], repeat(bytes(2**16))),
    "a busy server": lambda: chain([head(status="429 No")], repeat(bytes(2**16))),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_endless_answers(call, kind):
    with answering(ENDLESS[kind]) as server:
        with pytest.raises(BadAnswer, match=f"at least [0-9]+ bytes, the limit is {MB}") as caught:
            score(call, server, client=OPTIONS)
        assert "max_answer_bytes" in str(caught.value)
        assert server.requests == 1
        with pytest.raises(BadAnswer, match="the limit is"):
            call(server.url, "models", client=OPTIONS)
        assert not call(server.url, "ready", client=OPTIONS)
        assert server.sent < 64 * MB  # what the machine holds between the two
    assert MAX_ANSWER_BYTES == 256 * MB


def test_an_answer_at_the_limit(call):
    body = json.dumps(WHOLE | {"scores": [[0.5]]}).encode()
    for content, more in ((body, ()), (gzip.compress(body), ["Content-Encoding: gzip"])):
        whole = head(f"Content-Length: {len(content)}", *more) + content
        with answering(lambda whole=whole: [whole]) as server:
            assert score(call, server, client={"max_answer_bytes": len(body)}).scores == 0.5
            with pytest.raises(BadAnswer, match=f"the limit is {len(body) - 1}"):
                score(call, server, client={"max_answer_bytes": len(body) - 1})
    with pytest.raises(ValueError, match="max_answer_bytes"):
        call("http://127.0.0.1:9", "ready", client={"max_answer_bytes": 0})


def test_codings_that_nobody_asked_for(call):
    whole = head("Content-Encoding: br", "Content-Length: 1") + b"x"
    with answering(lambda: [whole]) as server, pytest.raises(BadAnswer, match="Content-Encoding"):
        score(call, server)


def test_short_values(call):
    """Decoded, such values would take many times their bytes in memory."""
    content = b'{"scores": [[' + b"0," * (MOST_VALUES + 1) + b"0]]}"
    whole = head(f"Content-Length: {len(content)}") + content
    with answering(lambda: [whole]) as server:
        with pytest.raises(BadAnswer, match=f"{MOST_VALUES + 1} values, the limit is"):
            score(call, server)
        assert server.requests == 1


TRICKLES = {
    "body": lambda: chain([head("Content-Length: 1000000")], slowly(repeat(b" "))),
    "chunks": lambda: chain([head("Transfer-Encoding: chunked")], slowly(repeat(b"1\r\n \r\n"))),
    "head": lambda: chain([b"HTTP/1.1 200 OK\r\nX: "], slowly(repeat(b"a"))),
    "status": lambda: slowly(repeat(head(status="100 Continue"))),
    "retries": lambda: slowly([head("Content-Length: 0", "Retry-After: 0", status="503 No")]),
    "a slow error": lambda: chain(
        [head("Content-Length: 1000000", status="503 No")], slowly(repeat(b" "))
    ),
}


@pytest.mark.parametrize("kind", TRICKLES)
@pytest.mark.parametrize("parts", [1, 3])
def test_the_deadline_holds(call, kind, parts):
    """Every read gets a byte in time, so only a limit on the whole call ends it."""
    client = {"deadline": 0.6, "max_items_per_request": 1, "max_attempts": 10**6}
    before = {thread.name for thread in threading.enumerate()}
    with answering(TRICKLES[kind]) as server:
        start = time.monotonic()
        with pytest.raises(ClientError) as caught:
            call(server.url, "score", "q", ["a"] * parts, labels=["yes"], client=client)
        assert 0.3 < time.monotonic() - start < 10  # a machine may be busy
        if kind == "retries":
            assert server.requests > 1
        else:
            assert isinstance(caught.value, ConnectionFailed)
    left = {thread.name for thread in threading.enumerate()} - before
    assert left <= {NAME}, "no thread of the client's goes on"


@pytest.mark.parametrize("options", [{"deadline": 0.6}, {"timeout": 0.1}])
def test_a_server_that_reads_slowly(call, options):
    with answering(list, read=False) as server:
        start = time.monotonic()
        with pytest.raises(ConnectionFailed):
            call(server.url, "score", "q", ["a" * 24 * MB], labels=["yes"], client=options)
        assert time.monotonic() - start < 20


def test_a_connection_serves_later_calls(call):
    """Each call on a connection has a deadline of its own."""
    body = json.dumps({"data": [{"id": "m"}]}).encode()
    whole = head(f"Content-Length: {len(body)}") + body
    with answering(lambda: slowly([whole], 0.2)) as server, Client(server.url) as client:
        for _ in range(3):
            client._settings = replace(
                client._settings, policy=replace(client._settings.policy, deadline=5.0)
            )
            assert client.models()[0].id == "m"
        assert server.requests == 3


def failure(call, pieces, kind, **more):
    with answering(lambda: pieces) as server, pytest.raises(kind) as caught:
        score(call, server, **more)
    return caught.value


def sent(status, content):
    raw = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    return [head(f"Content-Length: {len(raw)}", status=f"{status} -") + raw]


@pytest.mark.parametrize(
    "body", ["[" * 10**6, '{"x":' * 10**5, '{"scores": [[0.5]], "x": ' + "[" * 10**6, "\ud800", ""]
)
def test_what_is_no_answer(call, body):
    raw = body.encode(errors="surrogatepass")
    failure(call, [head(f"Content-Length: {len(raw)}") + raw], BadAnswer)


EVIL = "\x1b[31mred\x1b[0m\r\n\x07\u202e\x9b"


def plain(error):
    for text in (str(error), error.request_id, repr(error)):
        assert text.isprintable(), text
        assert len(text) < 4 * LONGEST_TEXT
    while error is not None:  # also those that a traceback shows
        assert str(error).isprintable()
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.mark.parametrize("bad", ["\x1b[31mred", "a" * 129, "a b", "", "grün", "<b>"])
def test_only_checked_ids_are_shown(call, bad):
    fields = [f"X-Request-Id: {bad}", "Content-Length: 2"]
    for status, error in (("200 OK", BadAnswer), ("400 No", StatusError)):
        answer = failure(call, [head(*fields, status=status) + b"{}"], error, request_id="mine")
        assert answer.request_id == "mine"
        plain(answer)
    good = ["X-Request-Id: theirs.-_9", "Content-Length: 2"]
    answer = failure(call, [head(*good, status="400 No") + b"{}"], StatusError, request_id="mine")
    assert answer.request_id == "theirs.-_9"
    assert REQUEST_ID.pattern.encode() == record._REQUEST_ID.pattern


@pytest.mark.parametrize("size", [1, 10**4])
def test_errors_hold_plain_text(call, size):
    text = EVIL * size
    error = {"message": text, "code": text, "param": text}
    once = {"client": {"max_attempts": 1}}
    for status in (400, 503):
        answer = failure(call, sent(status, {"error": error}), StatusError, **once)
        plain(answer)
        for shown in (answer.message, answer.code, answer.param):
            assert shown.startswith("\\x1b[31mred")
            assert shown.isprintable()
        plain(failure(call, sent(status, text), StatusError, **once))
    plain(failure(call, [text.encode() + b"\r\n\r\n"], ConnectionFailed, **once))
    row = {"index": 0, "num_classes": 1, "label": text, "probs": [1.0]}
    for fields in ({"labels": [text], "data": [row]}, {"labels": [], "data": [{text: 1}]}):
        whole = sent(200, WHOLE | fields)
        with answering(lambda whole=whole: whole) as server, pytest.raises(BadAnswer) as caught:
            call(server.url, "classify", ["t"], labels=["a"])
        plain(caught.value)


@pytest.mark.parametrize("when", ["9" * 400, "Mon, 01 Jan 0001 00:00:00 +2359", "-1", "x"])
def test_absurd_times_to_wait(call, when):
    fields = [f"Retry-After: {when}", "Content-Length: 0"]
    client = {"max_attempts": 2, "deadline": 5}
    failure(call, [head(*fields, status="429 No")], StatusError, client=client)
