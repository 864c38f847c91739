"""Promise: limits hold for all processes that share them, and one that has ended counts no more."""

import os

import pytest

from engine.test_admission import request
from gpuscore.config import EngineConfig
from gpuscore.engine.admission import Backlog, Counts
from gpuscore.errors import Overloaded
from gpuscore.processes.fronts.board import Board


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
    _, (one, two, three) = backlogs(3, **limits)
    one.admit(request(5))
    two.admit(request(5))
    two.admit(request(5))
    with pytest.raises(Overloaded, match="3 requests with 15 tokens are in flight"):
        three.admit(request(5, 5))
    two.leave(request(5))
    three.admit(request(5))


def test_the_wait_is_that_for_the_requests_of_all():
    _, (one, two) = backlogs(2, rate=10.0)
    alone = Backlog(EngineConfig(), lambda: 10.0)
    for number, tokens in enumerate((5, 63, 111, 500, 7)):
        (one, two)[number % 2].admit(request(tokens))
        alone.admit(request(tokens))
    for tokens in (1, 63, 100, 1000):
        assert one.seconds_ahead(tokens) == two.seconds_ahead(tokens) == alone.seconds_ahead(tokens)
    assert one.retry_after == two.retry_after == alone.retry_after


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX; the child only counts
def test_counts_of_another_process_are_seen_until_it_is_cleared():
    board, (one, two) = backlogs(2, max_queued_requests=1)
    if (pid := os.fork()) == 0:
        two.admit(request(5))
        os._exit(0)
    os.waitpid(pid, 0)
    assert (one.requests, one.tokens) == (1, 5)
    with pytest.raises(Overloaded):
        one.admit(request(1))
    board.clear(1)
    one.admit(request(1))


def test_engines_do_not_share_counts():
    board = Board(2, engines=2)
    first = Backlog(EngineConfig(), lambda: 0.0, board.backlog(0, 0))
    second = Backlog(EngineConfig(), lambda: 0.0, board.backlog(0, 1))
    first.admit(request(5))
    assert (first.requests, second.requests, board.gate(0).total(1)) == (1, 0, 0)
    board.set_retry_after(1, 9)
    assert (board.retry_after(0), board.retry_after(1)) == (1, 9)
