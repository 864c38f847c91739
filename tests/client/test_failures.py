"""Promise: both clients retry what may succeed, with growing waits and within the deadline, and
raise everything else at once."""

import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from client.conftest import WHOLE
from gpuscore.client import ConnectionFailed, StatusError
from gpuscore.client.retries import FIRST_BACKOFF, LONGEST_BACKOFF, Attempts, Policy, Reply
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
        found = score(call, server, request_id="r")
        assert wait <= time.monotonic() - start < wait + 1.5
    assert found.scores.tolist() == [[0.5]]
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
    """Its error is raised at once, while other parts wait for their next attempt."""

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
