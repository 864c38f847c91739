"""Promise: every position of a prompt is scored once, in chunks or beside others, and never from
the prefix cache."""

from dataclasses import replace

import numpy as np
import pytest

from gpuscore.arrays import NO_TOKENS
from gpuscore.backends.base import OutOfMemory
from gpuscore.engine.runner import Runner
from gpuscore.errors import NonfiniteScore
from gpuscore.probabilities import position_logprobs
from gpuscore.request import ScoreRequest, ScoreResult, Timings
from support.stepped_runner import run, submit
from support.tape_backend import TapeBackend, tape_logit, tape_lse


def request_of(rng, lengths, *, every=True, query=0):
    items = tuple(rng.integers(0, 900, n).astype(np.int32) for n in lengths)
    labels = tuple(rng.integers(0, 900, n if every else 2).astype(np.int32) for n in lengths)
    query_ids = rng.integers(0, 900, query).astype(np.int32)
    return ScoreRequest(query_ids, items, labels, need_lse=True, every_position=every)


def check(ticket):
    request, result = ticket.request, ticket.future.result(timeout=0)
    lse = []
    for item, labels, logits in zip(
        request.item_ids, request.label_ids, result.label_logits, strict=True
    ):
        prompts = [item[: n + 1] for n in range(len(item))]
        want = [
            tape_logit(prompt, int(label)) for prompt, label in zip(prompts, labels, strict=True)
        ]
        assert logits.tolist() == want
        lse += [tape_lse(prompt) for prompt in prompts]
    assert result.lse.tolist() == lse


@pytest.mark.parametrize("max_tokens", [1, 7, 32, 1000])
def test_in_any_chunks_beside_other_requests(max_tokens):
    rng = np.random.default_rng(max_tokens)
    runner = Runner(TapeBackend(max_tokens=max_tokens, num_pages=200))
    first = submit(runner, request_of(rng, [1, 2, 63, 9, 111, 1]))
    other = submit(runner, request_of(rng, [5, 30], every=False, query=20))
    second = submit(runner, request_of(rng, [40, 33]))
    run(runner)
    check(first)
    check(second)
    assert other.future.result(timeout=0).computed_tokens > 0


def test_the_cache_is_neither_read_nor_written():
    rng = np.random.default_rng(0)
    runner = Runner(TapeBackend(max_tokens=32, num_pages=200))
    request = request_of(rng, [100, 20])
    item = request.item_ids[0]
    plain = ScoreRequest(item[:80], (item[80:],), (item[:1],), need_lse=True)
    for each in (plain, request, plain, request):
        before = runner.scheduler.pages.num_cached
        ticket = submit(runner, each)
        run(runner)
        if each is request:
            check(ticket)
            assert ticket.future.result().computed_tokens == 120
            assert runner.scheduler.pages.num_cached == before
    assert runner.scheduler.cached_tokens == 80, "of the second plain one"


def test_progress_counts_rows():
    seen = []
    runner = Runner(TapeBackend(max_tokens=32, num_pages=200))
    submit(runner, request_of(np.random.default_rng(0), [100, 20]), seen.append)
    run(runner)
    assert seen == sorted(seen)
    assert seen[-1] == 120
    assert len(seen) > 3


@pytest.mark.parametrize("failing", range(5))
def test_a_failed_chunk_costs_itself_and_the_one_launched_since(failing):
    backend = TapeBackend(max_tokens=32, num_pages=128)
    collect, steps = backend.collect, []

    def failing_once(pending):
        steps.append(pending)
        if len(steps) == failing + 1:
            raise OutOfMemory("once")
        return collect(pending)

    backend.collect = failing_once
    runner = Runner(backend)
    ticket = submit(runner, request_of(np.random.default_rng(0), [150]))
    run(runner)
    check(ticket)
    assert 150 < sum(batch.num_tokens for batch in backend.batches) <= 150 + 2 * 32


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("spoilt", [0, 2, 4])
def test_a_chunk_that_is_not_finite_runs_again(spoilt, always):
    """The spoilt chunk and what was launched since on its pages run again, but no earlier chunk."""
    backend = TapeBackend(max_tokens=32, num_pages=128)
    plain, steps = backend._run, []

    def run_spoilt(batch):
        scores = plain(batch)
        steps.append(batch)
        if len(steps) == spoilt + 1 or (always and len(steps) > spoilt):
            scores.lse[3] = np.nan
        return scores

    backend._run = run_spoilt
    runner = Runner(backend)
    ticket = submit(runner, request_of(np.random.default_rng(0), [150]))
    run(runner)
    if always:
        assert isinstance(ticket.future.exception(), NonfiniteScore)
        return
    check(ticket)
    assert runner.counters().nonfinite_rows == 1
    assert 150 < sum(batch.num_tokens for batch in backend.batches) <= 150 + 2 * 32


def test_a_small_request_is_not_stuck_behind_a_large_one():
    rng = np.random.default_rng(0)
    runner = Runner(TapeBackend(max_tokens=128, num_pages=400))
    large = submit(runner, request_of(rng, [60] * 100))
    for _ in range(3):
        runner.step()
    small = submit(runner, request_of(rng, [20] * 3))
    for _ in range(4):
        runner.step()
    assert small.future.done()
    assert not large.future.done()
    run(runner)
    check(large)


def test_greedy_is_exactly_the_best_token():
    """Logits of labels and of best tokens are summed in different orders, so either may be
    larger."""
    labels = np.array([7, 5, 5, 9, 3], np.int32)
    logits = np.array([1.0000001, 2, 2, 3, 4.0000005], np.float32)
    best_ids = np.array([7, 5, 6, 1, 4], np.int32)
    best = np.array([1, 2, 2, 4, 4], np.float32)
    lse = np.array([5, 5, 5, 5, 4], np.float32)
    result = ScoreResult((logits,), lse, best_ids, best, 5, Timings(0, 0, 0))
    found = position_logprobs(result, [labels])
    assert (found.label == found.best).tolist() == [True, True, False, False, False]
    assert (found.label <= found.best).all()
    assert (found.best <= 0).all()
    np.testing.assert_allclose(found.label, [-4, -3, -3, -2, 0], atol=1e-6)
    np.testing.assert_allclose(found.best, best - lse, atol=1e-6)


def test_a_request_that_does_not_hold_together():
    request = request_of(np.random.default_rng(0), [3, 4])
    with pytest.raises(ValueError, match="one label for each token"):
        replace(request, label_ids=request.label_ids[::-1])
    with pytest.raises(ValueError, match="no query"):
        replace(request, query_ids=request.item_ids[0])
    assert replace(request, query_ids=NO_TOKENS).num_rows == 7
