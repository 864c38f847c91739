"""Promise: however requests are split, packed or mixed, every item is scored once, for its whole
prompt."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec import structs

from gpuscore.backends.base import OutOfMemory
from gpuscore.engine.pages import PagePool, page_keys
from gpuscore.engine.runner import Runner
from gpuscore.errors import DeadlineExceeded, InsufficientMemory, InternalError, NonfiniteScore
from gpuscore.types.request import ScoreRequest
from support.stepped_runner import run, submit
from support.tape_backend import TapeBackend, tape_logit, tape_lse


def request_of(rng, query_len, item_lens: Sequence[int], priority=0, need_lse=True):
    def ids(n):
        return rng.integers(0, 900, n).astype(np.int32)

    labels = tuple(ids(int(rng.integers(1, 4))) for _ in item_lens)
    return ScoreRequest(
        ids(query_len), tuple(ids(n) for n in item_lens), labels, need_lse, priority=priority
    )


def check(ticket):
    request, result = ticket.request, ticket.future.result(timeout=0)
    assert len(result.label_logits) == len(request.item_ids)
    for index, (item, labels) in enumerate(zip(request.item_ids, request.label_ids, strict=True)):
        prompt = [*request.query_ids, *item]
        expected = [tape_logit(prompt, int(label)) for label in labels]
        np.testing.assert_array_equal(result.label_logits[index], expected)
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


def test_ten_thousand_items_need_one_chunk_of_memory():
    rng = np.random.default_rng(0)
    backend = TapeBackend(max_tokens=2048, page_size=16, num_pages=3)  # only the query's pages
    runner = Runner(backend)
    ticket = submit(runner, request_of(rng, 40, [20] * 10_000, need_lse=False))
    run(runner)
    assert ticket.future.done()
    assert max(batch.num_tokens for batch in backend.batches) <= 2048
    assert len(backend.batches) <= 2 + 10_000 // (2048 // 20)
    assert sum(batch.num_tokens for batch in backend.batches) == 40 + 200_000


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


def with_nan(backend, monkeypatch, broken, times):
    """Put NaN into the third row, or else the last, of the first `times` batches."""
    plain, left = backend.run, [times]

    def run_with_nan(batch):
        scores = plain(batch)
        if left[0]:
            row = min(2, len(batch.score_rows) - 1)
            target = scores.label_logits if broken == "label" else scores.lse
            target[batch.cu_labels[row] if broken == "label" else row] = np.nan
            left[0] -= 1
        return scores

    monkeypatch.setattr(backend, "run", run_with_nan)


@pytest.mark.parametrize("broken", ["label", "lse"])
def test_a_row_that_stays_not_finite_names_its_item(broken, monkeypatch):
    rng = np.random.default_rng(0)
    backend = TapeBackend(max_tokens=64)
    with_nan(backend, monkeypatch, broken, times=2)
    runner = Runner(backend)
    ticket = submit(runner, request_of(rng, 5, [3, 3, 3, 3]))
    run(runner)
    error = ticket.future.exception()
    assert isinstance(error, NonfiniteScore)
    assert error.param == "items[2]"


def test_a_row_that_is_not_finite_once_is_run_again_alone(monkeypatch):
    rng = np.random.default_rng(0)
    backend = TapeBackend(max_tokens=64)
    with_nan(backend, monkeypatch, "label", times=1)
    runner = Runner(backend)
    ticket = submit(runner, request_of(rng, 5, [3, 3, 3, 3]))
    run(runner)
    check(ticket)
    assert [len(batch.score_rows) for batch in backend.batches] == [4, 1]


def copy_of(request, **changes):
    return structs.replace(request, **changes)


def test_a_prefix_is_computed_once(monkeypatch):
    """A query's full pages are found again; tokens after its last full page are not kept."""
    rng = np.random.default_rng(0)
    backend = TapeBackend(max_tokens=64, page_size=4)
    runner = Runner(backend)
    request = request_of(rng, 30, [5, 6, 7])
    for expected in (30 + 18, 2 + 18, 2 + 18):
        ticket = submit(runner, request)
        run(runner)
        check(ticket)
        assert ticket.future.result().computed_tokens == expected
    assert runner.scheduler.cached_tokens == 56


def test_a_static_prefix_is_shared_by_different_queries():
    rng = np.random.default_rng(0)
    runner = Runner(TapeBackend(max_tokens=64, page_size=4))
    first = request_of(rng, 30, [5])
    other = np.concatenate([first.query_ids[:17], rng.integers(0, 900, 20).astype(np.int32)])
    for query, expected in ((first.query_ids, 35), (other, 37 - 16 + 5)):
        ticket = submit(runner, copy_of(first, query_ids=query))
        run(runner)
        check(ticket)
        assert ticket.future.result().computed_tokens == expected


def test_salts_and_the_switch_separate_caches():
    rng = np.random.default_rng(0)
    request = request_of(rng, 30, [5])
    for cached, salts in ((True, ("a", "b")), (False, ("a", "a"))):
        runner = Runner(TapeBackend(max_tokens=64, page_size=4), prefix_cache=cached)
        for salt in salts:
            ticket = submit(runner, copy_of(request, salt=salt))
            run(runner)
            assert ticket.future.result().computed_tokens == 35


def test_a_burst_of_one_query_computes_it_once():
    """The later requests wait for the pages that the first one is about to publish."""
    rng = np.random.default_rng(0)
    backend = TapeBackend(max_tokens=64, page_size=4, num_pages=256)
    runner = Runner(backend)
    query = request_of(rng, 100, [1]).query_ids
    tickets = [
        submit(runner, copy_of(request_of(rng, 0, [3, 4]), query_ids=query)) for _ in range(5)
    ]
    run(runner)
    for ticket in tickets:
        check(ticket)
    assert sum(batch.num_tokens for batch in backend.batches) == 100 + 5 * 7


def test_a_small_request_is_not_stuck_behind_a_large_one():
    rng = np.random.default_rng(0)
    runner = Runner(TapeBackend(max_tokens=1024, num_pages=400))
    large = submit(runner, request_of(rng, 100, [20] * 2000))
    for _ in range(3):
        runner.step()
    small = submit(runner, request_of(rng, 100, [20] * 10))
    steps = 0
    while not small.future.done():
        runner.step()
        steps += 1
    assert steps <= 3
    assert not large.future.done()
    run(runner)
    check(large)


def test_out_of_memory_halves_the_batches_and_they_recover():
    rng = np.random.default_rng(0)
    backend = TapeBackend(max_tokens=256, num_pages=200)
    plain = backend.extend
    limit = [40]

    def extend(batch):
        if batch.num_tokens > limit[0]:
            raise OutOfMemory(f"{batch.num_tokens} tokens")
        return plain(batch)

    backend.extend = extend
    runner = Runner(backend)
    tickets = [submit(runner, request_of(rng, 60, [9] * 30)) for _ in range(3)]
    run(runner)
    for ticket in tickets:
        check(ticket)
    assert runner.counters().oom_retried >= 3
    assert runner.scheduler.token_budget < 256
    limit[0] = 1000
    later = submit(runner, request_of(rng, 60, [9] * 1500))
    run(runner)
    check(later)
    assert runner.scheduler.token_budget == 256


@pytest.mark.parametrize("failing", range(1, 12))
def test_a_failed_chunk_of_a_long_item_costs_itself_and_the_one_launched_since(failing):
    backend = TapeBackend(
        max_tokens=32,
        num_pages=128,
        fault=lambda step: OutOfMemory("once") if step == failing else None,
    )
    runner = Runner(backend)
    request = request_of(np.random.default_rng(0), 10, [400])
    ticket = submit(runner, request)
    run(runner)
    check(ticket)
    once = 10 + 2 + 400  # the query, its last partial page again, the item
    assert once < sum(batch.num_tokens for batch in backend.batches) <= once + 2 * 32


def test_an_item_that_never_fits_fails_its_own_request_only():
    rng = np.random.default_rng(0)
    backend = TapeBackend(max_tokens=256, num_pages=200)
    plain = backend.extend

    def extend(batch):
        if np.diff(batch.cu_seqlens).max() > 100:
            raise OutOfMemory("a segment of over 100 tokens")
        return plain(batch)

    backend.extend = extend
    runner = Runner(backend)
    bad = submit(runner, request_of(rng, 60, [9, 120, 9]))
    good = [submit(runner, request_of(rng, 60, [9] * 30)) for _ in range(3)]
    run(runner)
    assert isinstance(bad.future.exception(), InsufficientMemory)
    for ticket in good:
        check(ticket)


@pytest.mark.parametrize("always", [False, True])
def test_a_long_item_that_is_not_finite_runs_again_in_chunks(always):
    backend = TapeBackend(max_tokens=32, num_pages=128)
    collect, spoilt = backend.collect, []

    def spoil(pending):
        scores = collect(pending)
        if len(scores.label_logits) and (always or not spoilt):
            spoilt.append(scores)
            nan = np.full_like(scores.label_logits, np.nan)
            scores = dataclasses.replace(scores, label_logits=nan)
        return scores

    backend.collect = spoil
    runner = Runner(backend)
    ticket = submit(runner, request_of(np.random.default_rng(0), 10, [100]))
    run(runner)
    if always:
        assert isinstance(ticket.future.exception(), NonfiniteScore)
        assert len(spoilt) == 2
    else:
        check(ticket)


@pytest.mark.parametrize("count", [1, 3])
def test_small_requests_are_not_tried_for_ever(count):
    """If even the smallest batch does not fit, the requests fail instead of being retried for
    ever."""
    rng = np.random.default_rng(0)
    runner = Runner(TapeBackend(fault=lambda step: OutOfMemory("always")))
    tickets = [submit(runner, request_of(rng, 2, [1, 1])) for _ in range(count)]
    run(runner)
    for ticket in tickets:
        assert isinstance(ticket.future.exception(), InsufficientMemory)


def test_a_deadline_drops_what_has_not_run():
    rng = np.random.default_rng(0)
    now = [0.0]
    runner = Runner(TapeBackend(max_tokens=64, num_pages=200), lambda: now[0])
    late = submit(runner, copy_of(request_of(rng, 60, [9] * 300), deadline=5.0))
    runner.step()
    now[0] = 5.0
    run(runner)
    assert isinstance(late.future.exception(), DeadlineExceeded)
    assert len(runner.backend.batches) <= 2


def keys_of(tokens, size=4):
    return tuple(page_keys("model", "", np.array(tokens, np.int32), size))


def test_pages_are_counted():
    pool = PagePool(5)
    first = pool.allocate(3)
    assert pool.allocate(3) is None
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 0, 3)
    pool.release(first)
    with pytest.raises(ValueError, match="not in use"):
        pool.release(first[:1])
    pool.check_integrity()
    assert pool.num_free == 5
    pool.num_pages = 6
    with pytest.raises(RuntimeError, match="5 free, 0 cached and 0 used of 6"):
        pool.check_integrity()


def test_the_least_recently_used_pages_are_evicted_first_and_ends_before_beginnings():
    pool = PagePool(5)
    keys, other = keys_of(range(12)), keys_of([7] * 8)
    for some in (keys, other):
        pages = pool.allocate(len(some))
        for page, key in zip(pages, some, strict=True):
            pool.publish(int(page), key)
        pool.release(pages)
    assert pool.num_cached == 5
    pool.release(pool.find(other)[0])
    pool.release(pool.find(keys)[0])  # now the most recently used
    pool.release(pool.allocate(1))
    assert len(pool.find(other)[0]) == 1, "its end went first"
    pool.check_integrity()
    assert pool.allocate(4).tolist() != []
    assert pool.find(keys)[0] == []
    pool.check_integrity()


def test_a_collision_of_digests_is_a_miss():
    pool = PagePool(2)
    (key,) = keys_of([1, 2, 3, 4])
    pages = pool.allocate(1)
    pool.publish(int(pages[0]), key)
    forged = dataclasses.replace(key, tokens=b"something else")
    assert pool.find([forged])[0] == []
    assert pool.find([key])[0] == pages.tolist()


def test_keys_tell_models_salts_and_tokens_apart():
    tokens = np.arange(12, dtype=np.int32)
    base = [k.digest for k in page_keys("m", "s", tokens, 4)]
    assert len(base) == 3
    assert [k.digest for k in page_keys("m", "s", tokens[:11], 4)] == base[:2]
    for other in (("n", "s"), ("m", "t"), ("ms", ""), ("", "ms")):
        assert not set(base) & {k.digest for k in page_keys(*other, tokens, 4)}
    assert len(list(page_keys("m", "s", tokens[:3], 4))) == 0, "shorter than a page"
