"""Promises: a request over a limit is refused with the numbers and the seconds after which to
retry; limits hold for all processes that share them, and one that has ended counts no more."""

import numpy as np
import pytest

from gpuscore.config import EngineConfig
from gpuscore.dialects.served import Backlog
from gpuscore.errors import Overloaded
from gpuscore.server.http.admission import soonest
from gpuscore.types.batch import NO_TOKENS
from gpuscore.types.request import ScoreRequest


def request(*items, query=0):
    ids = tuple(np.zeros(n, np.int32) for n in items)
    labels = (np.array([3], np.int32),) * len(ids)
    return ScoreRequest(np.zeros(query, np.int32) if query else NO_TOKENS, ids, labels, True)


def backlog(rate=0.0, **limits):
    return Backlog(EngineConfig(**limits), lambda: rate)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_queued_requests": 2}, "2 requests with 14 tokens are in flight"),
        ({"max_queued_tokens": 18}, "14 tokens are in flight, the limit is 18 tokens"),
        ({"max_queued_items": 4}, "with 4 items; the limit is 4 items"),
    ],
)
def test_each_limit(limits, reason):
    counted = backlog(**limits)
    first, second = request(5, 5), request(1, 3)
    counted.admit(first)
    counted.admit(second)
    with pytest.raises(Overloaded, match=reason) as refused:
        counted.admit(request(2, 3))
    assert refused.value.retry_after == 1
    counted.leave(first)
    counted.admit(request(2, 3))
    assert (counted.requests, counted.items, counted.tokens) == (2, 4, 9)


def test_one_request_is_always_admitted():
    counted = backlog(max_queued_requests=1, max_queued_tokens=1, max_queued_items=1)
    large = request(*[7] * 100)
    counted.admit(large)
    counted.leave(large)
    assert (counted.requests, counted.items, counted.tokens) == (0, 0, 0)


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 1), (1000.0, 1), (10.0, 10), (1.0, 30)])
def test_retry_after_is_the_time_that_the_backlog_takes(rate, seconds):
    counted = backlog(rate, max_queued_requests=1)
    counted.admit(request(100))
    with pytest.raises(Overloaded) as refused:
        counted.admit(request(1))
    assert refused.value.retry_after == seconds
    # Of several models it is the first to have time; with none, the least there is.
    assert soonest([counted]) == seconds
    assert soonest([counted, backlog()]) == soonest([backlog(), counted]) == soonest([]) == 1


def test_a_small_request_does_not_wait_for_all_of_a_large_one():
    """Tokens are dealt out evenly: until 20 are done, each other request gets at most 20."""
    counted = backlog(10.0)
    for size in (1000, 900, 7):
        counted.admit(request(size))
    assert counted.seconds_ahead(20) == pytest.approx((20 + 20 + 7) / 10)
    assert counted.seconds_ahead(10**6) == pytest.approx(1907 / 10)
    assert counted.wait_refusal(20, 4.8) is None
    refusal = counted.wait_refusal(20, 2.7)
    assert refusal.retry_after == 2
    assert "3 requests with 1907 tokens are in flight, a wait of about 5 seconds" in str(refusal)
    assert "the limit is 2.7" in str(refusal)


def test_an_unknown_rate_refuses_nobody():
    counted = backlog(0.0)
    counted.admit(request(10**6))
    assert counted.wait_refusal(1, 0.1) is None
