"""Promises: a request over a limit is refused with the numbers and the seconds after which to
retry; limits hold for all processes that share them, and one that has ended counts no more."""

import os

import numpy as np
import pytest

from gpuscore.config import EngineConfig
from gpuscore.engine.admission import Backlog, Counts
from gpuscore.errors import Overloaded
from gpuscore.processes.fronts.board import Board
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


def backlogs(fronts, rate=0.0, **limits):
    board = Board(fronts, engines=2)
    config = EngineConfig(**limits)
    return board, [Backlog(config, lambda: rate, board.backlog(n, 1)) for n in range(fronts)]


def test_totals_are_sums_of_the_same_place():
    table = memoryview(bytearray(8 * 3 * 5)).cast("q")
    parts = [Counts(table, 5, row, first=2) for row in range(3)]
    for row, part in enumerate(parts):
        part.add(0, 10**row)
        part.add(2, -(10**row))
    assert [part.total(0) for part in parts] == [111] * 3
    assert parts[1].totals(0, 3) == [111, 0, -111]
    assert Counts(table, 5, 0).totals(0, 5) == [0, 0, 111, 0, -111]
    alone = Counts.alone(3)
    alone.add(1, 7)
    assert (alone.total(1), alone.totals(0, 3)) == (7, [0, 7, 0])


@pytest.mark.parametrize(
    "limits", [{"max_queued_requests": 3}, {"max_queued_tokens": 15}, {"max_queued_items": 4}]
)
def test_backlogs_of_several_fronts_count_together(limits):
    _, (first, second, third) = backlogs(3, **limits)
    first.admit(request(5))
    second.admit(request(5))
    second.admit(request(5))
    with pytest.raises(Overloaded, match="3 requests with 15 tokens are in flight"):
        third.admit(request(5, 5))
    second.leave(request(5))
    third.admit(request(5))


def test_the_wait_is_that_for_the_requests_of_all():
    _, (first, second) = backlogs(2, rate=10.0)
    alone = Backlog(EngineConfig(), lambda: 10.0)
    for number, tokens in enumerate((5, 63, 111, 500, 7)):
        (first, second)[number % 2].admit(request(tokens))
        alone.admit(request(tokens))
    for tokens in (1, 63, 100, 1000):
        assert (
            first.seconds_ahead(tokens)
            == second.seconds_ahead(tokens)
            == alone.seconds_ahead(tokens)
        )
    assert first.retry_after == second.retry_after == alone.retry_after


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX; the child only counts
def test_counts_of_another_process_are_seen_until_it_is_cleared():
    board, (first, second) = backlogs(2, max_queued_requests=1)
    if (pid := os.fork()) == 0:
        second.admit(request(5))
        os._exit(0)
    os.waitpid(pid, 0)
    assert (first.requests, first.tokens) == (1, 5)
    with pytest.raises(Overloaded):
        first.admit(request(1))
    board.clear(1)
    first.admit(request(1))


def test_engines_do_not_share_counts():
    board = Board(2, engines=2)
    first = Backlog(EngineConfig(), lambda: 0.0, board.backlog(0, 0))
    second = Backlog(EngineConfig(), lambda: 0.0, board.backlog(0, 1))
    first.admit(request(5))
    assert (first.requests, second.requests, board.gate(0).total(1)) == (1, 0, 0)
    board.set_retry_after(1, 9)
    assert (board.retry_after(0), board.retry_after(1)) == (1, 9)
