"""Promise: whatever is split, packed or mixed, every item is scored once, for its whole prompt."""

from collections.abc import Sequence

import numpy as np
import pytest

from gpuscore.engine.pages import PagePool
from gpuscore.engine.runner import Runner, Ticket
from gpuscore.errors import InternalError, NonfiniteScore
from gpuscore.types import ScoreRequest
from support.tape import TapeBackend, tape_logit, tape_lse


def request_of(rng, query_len, item_lens: Sequence[int], priority=0, need_lse=True):
    def ids(n):
        return rng.integers(0, 900, n).astype(np.int32)

    labels = tuple(ids(int(rng.integers(1, 4))) for _ in item_lens)
    return ScoreRequest(
        ids(query_len), tuple(ids(n) for n in item_lens), labels, need_lse, priority=priority
    )


def submit(runner, request):
    from concurrent.futures import Future

    ticket = Ticket(request, Future(), None, arrived=0.0)
    runner.add(ticket)
    return ticket


def run(runner):
    """Step until idle; pages are checked after every step."""
    for _ in range(10_000):
        if runner.idle:
            break
        runner.step()
        runner.scheduler.pages.check_integrity()
    assert runner.idle
    assert runner.scheduler.pages.num_free == runner.backend.limits.num_pages
    assert len(runner.scheduler) == 0


def check(ticket):
    request, result = ticket.request, ticket.future.result(timeout=0)
    assert len(result.label_logits) == len(request.item_ids)
    for index, (item, labels) in enumerate(zip(request.item_ids, request.label_ids, strict=True)):
        prompt = [*request.query_ids, *item]
        want = [tape_logit(prompt, int(label)) for label in labels]
        np.testing.assert_array_equal(result.label_logits[index], want)
        if request.need_lse:
            assert result.lse[index] == tape_lse(prompt)


@pytest.mark.parametrize("max_tokens", [1, 3, 8, 32, 1000])
@pytest.mark.parametrize("query_len", [0, 1, 4, 31, 97])
def test_one_request_in_any_chunks(max_tokens, query_len):
    rng = np.random.default_rng(max_tokens * 100 + query_len)
    runner = Runner(TapeBackend(max_tokens=max_tokens))
    ticket = submit(runner, request_of(rng, query_len, [1, 2, 8, 9, 40, 3, 33, 1]))
    run(runner)
    check(ticket)


@pytest.mark.parametrize("seed", range(60))
def test_random_requests_side_by_side(seed):
    rng = np.random.default_rng(seed)
    backend = TapeBackend(
        max_tokens=int(rng.choice([2, 16, 64, 300])),
        page_size=int(rng.choice([1, 4, 16])),
        num_pages=int(rng.integers(200, 400)),
    )
    runner = Runner(backend)
    tickets = []
    for _ in range(12):
        lens = rng.integers(1, rng.choice([3, 20, 60]), int(rng.integers(1, 12)))
        request = request_of(rng, int(rng.choice([0, 1, 17, 64])), lens, int(rng.integers(-2, 3)))
        tickets.append(submit(runner, request))
        for _ in range(int(rng.integers(0, 3))):
            runner.step()
        if rng.random() < 0.15:
            tickets[int(rng.integers(0, len(tickets)))].future.cancel()
    run(runner)
    for ticket in tickets:
        if not ticket.future.cancelled():
            check(ticket)


def test_ten_thousand_items_need_one_chunk_of_memory():
    rng = np.random.default_rng(0)
    backend = TapeBackend(max_tokens=2048, page_size=16, num_pages=125)
    runner = Runner(backend)
    ticket = submit(runner, request_of(rng, 2000, [20] * 10_000, need_lse=False))
    run(runner)
    assert ticket.future.done()
    assert max(batch.num_tokens for batch in backend.batches) <= 2048
    assert len(backend.batches) <= 2 + 10_000 // (2048 // 20)
    assert sum(batch.num_tokens for batch in backend.batches) == 2000 + 200_000


def test_priority_then_arrival():
    rng = np.random.default_rng(0)
    runner = Runner(TapeBackend(max_tokens=10))
    order: list[str] = []
    for name, priority in [("c", 5), ("a", -1), ("d", 5), ("b", 0)]:
        ticket = submit(runner, request_of(rng, 3, [7, 7], priority))
        ticket.future.add_done_callback(lambda _, name=name: order.append(name))
    run(runner)
    assert order == ["a", "b", "c", "d"]


def test_a_request_waits_for_pages_and_then_runs():
    rng = np.random.default_rng(0)
    runner = Runner(TapeBackend(max_tokens=64, page_size=4, num_pages=8))
    tickets = [submit(runner, request_of(rng, 30, [40, 5])) for _ in range(1)]
    assert not runner.scheduler.fits(request_of(rng, 33, [1]))
    tickets += [submit(runner, request_of(rng, 20, [5] * 30)) for _ in range(4)]
    run(runner)
    for ticket in tickets:
        check(ticket)


def test_a_failed_batch_fails_its_requests_only():
    rng = np.random.default_rng(0)
    backend = TapeBackend(
        max_tokens=16, fault=lambda step: RuntimeError("planted") if step == 1 else None
    )
    runner = Runner(backend)
    tickets = [submit(runner, request_of(rng, 10, [6] * 4)) for _ in range(3)]
    run(runner)
    failed = [ticket for ticket in tickets if ticket.future.exception() is not None]
    assert 0 < len(failed) < len(tickets)
    assert all(isinstance(ticket.future.exception(), InternalError) for ticket in failed)
    for ticket in tickets:
        if ticket not in failed:
            check(ticket)


@pytest.mark.parametrize("broken", ["label", "lse"])
def test_a_row_that_is_not_finite_names_its_item(broken, monkeypatch):
    rng = np.random.default_rng(0)
    backend = TapeBackend(max_tokens=64)
    plain = backend._run

    def run_with_nan(batch):
        scores = plain(batch)
        target = scores.label_logits if broken == "label" else scores.lse
        target[batch.cu_labels[2] if broken == "label" else 2] = np.nan
        return scores

    monkeypatch.setattr(backend, "_run", run_with_nan)
    runner = Runner(backend)
    ticket = submit(runner, request_of(rng, 5, [3, 3, 3, 3]))
    run(runner)
    error = ticket.future.exception()
    assert isinstance(error, NonfiniteScore)
    assert error.param == "items[2]"


def test_pages_are_held_once():
    pool = PagePool(5)
    first = pool.allocate(3)
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="not all held"):
        pool.free(np.array([*first, first[0]], dtype=np.int32))
    pool.free(first)
    with pytest.raises(ValueError, match="not all held"):
        pool.free(first)
    pool.check_integrity()
    assert pool.num_free == 5
    pool._free.append(0)
    with pytest.raises(RuntimeError):
        pool.check_integrity()
