"""Promise: every position of a prompt is scored, in chunks or beside others; of what prompts share,
and of what is cached with its results, only once."""

import numpy as np
import pytest
from msgspec.structs import replace

from gpuscore.dialects.completion_answer import position_logprobs
from gpuscore.engine.plan import plan_items
from gpuscore.engine.runner import Runner
from gpuscore.errors import NonfiniteScore
from gpuscore.types.batch import NO_TOKENS
from gpuscore.types.request import ScoreRequest, ScoreResult, Timings
from support.batches import every_token
from support.stepped_runner import run, submit
from support.tape_backend import TapeBackend, tape_logit, tape_lse


def request_of(rng, lengths, *, every=True, query=0):
    items = tuple(rng.integers(0, 900, n).astype(np.int32) for n in lengths)
    labels = tuple(rng.integers(0, 900, n if every else 2).astype(np.int32) for n in lengths)
    query_ids = rng.integers(0, 900, query).astype(np.int32)
    readouts = every_token(items) if every else None
    return ScoreRequest(query_ids, items, labels, need_lse=True, readouts=readouts)


def of_prompts(prompts, cut=0, *, scored=True):
    """Return a request whose labels are the tokens that follow, with `cut` tokens as its query."""
    arrays = [np.array(prompt, np.int32) for prompt in prompts]
    labels = [np.append(prompt[1:], prompt[:1]) for prompt in arrays]
    items = tuple(prompt[cut:] for prompt in arrays)
    return ScoreRequest(
        arrays[0][:cut],
        items,
        tuple(ids[cut:] for ids in labels),
        need_lse=True,
        readouts=every_token(items, labels[0][: cut * scored]),
    )


def check(ticket):
    request, result = ticket.request, ticket.future.result(timeout=0)
    lse = []
    query = request.query_ids
    spans = [(query, item) for item in request.item_ids]
    if len(request.readouts.query_labels):
        spans.insert(0, (query[:0], query))
    for (before, item), labels, logits in zip(
        spans, request.row_labels, result.label_logits, strict=True
    ):
        prompts = [np.append(before, item[: n + 1]) for n in range(len(item))]
        expected = [
            tape_logit(prompt, int(label)) for prompt, label in zip(prompts, labels, strict=True)
        ]
        assert logits.tolist() == expected
        lse += [tape_lse(prompt) for prompt in prompts]
    assert result.lse.tolist() == lse


def computed(runner, request):
    """Run a request and check its answer; return the number of tokens that were computed."""
    ticket = submit(runner, request)
    run(runner)
    if request.readouts is not None:
        check(ticket)
    return ticket.future.result().computed_tokens


def test_items_neither_read_nor_write_the_cache():
    rng = np.random.default_rng(0)
    runner = Runner(TapeBackend(max_tokens=32, num_pages=200))
    request = request_of(rng, [100, 20])
    item = request.item_ids[0]
    plain = ScoreRequest(item[:80], (item[80:],), (item[:1],), need_lse=True)
    for each in (plain, request, plain, request):
        before = runner.scheduler.pages.num_cached
        tokens = computed(runner, each)
        if each is request:
            assert tokens == 120
            assert runner.scheduler.pages.num_cached == before
    assert runner.scheduler.cached_tokens == 80, "of the second plain one"


@pytest.mark.parametrize("max_tokens", [7, 32, 1000])
def test_a_query_whose_rows_nobody_asks_for_is_read_from_the_cache_and_written_to_it(max_tokens):
    rng = np.random.default_rng(0)
    runner = Runner(TapeBackend(max_tokens=max_tokens, num_pages=200))
    start = rng.integers(0, 900, 80)
    some = [[np.append(start, rng.integers(0, 900, 9)) for _ in range(3)] for _ in range(2)]
    assert computed(runner, of_prompts(some[0], 80, scored=False)) == 80 + 3 * 9
    assert computed(runner, of_prompts(some[1], 80, scored=False)) == 3 * 9
    item = some[0][0][80:].astype(np.int32)
    plain = ScoreRequest(start.astype(np.int32), (item,), (item[:1],), need_lse=True)
    assert computed(runner, plain) == 9


@pytest.mark.parametrize("max_tokens", [7, 32, 1000])
def test_rows_of_a_query_are_answered_from_what_was_kept_with_its_pages(max_tokens):
    """Pages hold 4 tokens. The 80 tokens are found up to the last page, whose last row is for
    another token; of a request without rows, none is found, but the pages then hold them."""
    rng = np.random.default_rng(0)
    runner = Runner(TapeBackend(max_tokens=max_tokens, num_pages=400))
    start = rng.integers(0, 900, 80)
    choices = [np.append(start, [token, *rng.integers(0, 900, 8)]) for token in range(4)]
    item = choices[0][80:].astype(np.int32)
    plain = ScoreRequest(start.astype(np.int32), (item,), (item[:1],), need_lse=True)
    assert computed(runner, plain) == 89
    assert computed(runner, of_prompts(choices[:1], 88)) == 89, "pages without rows"
    assert computed(runner, plain) == 9
    for choice in choices[1:]:
        assert computed(runner, of_prompts([choice], 88)) == 89 - 76
    assert computed(runner, of_prompts(choices[:1], 88)) == 89 - 76, "the last ones' rows are kept"
    assert computed(runner, replace(of_prompts(choices[:1], 88), salt="other")) == 89
    runner.scheduler.pages.evict(1000)
    assert computed(runner, of_prompts(choices[:1], 88)) == 89


def test_requests_at_the_same_time_wait_for_the_shared_rows():
    rng = np.random.default_rng(0)
    runner = Runner(TapeBackend(max_tokens=64, num_pages=400))
    start = rng.integers(0, 900, 81)
    tickets = [
        submit(runner, of_prompts([np.append(start, rng.integers(0, 900, 8))], 88))
        for _ in range(4)
    ]
    run(runner)
    for ticket in tickets:
        check(ticket)
    assert sorted(t.future.result().computed_tokens for t in tickets) == [9, 9, 9, 89]


def test_kept_rows_are_for_other_labels_or_hold_too_little():
    rng = np.random.default_rng(0)
    runner = Runner(TapeBackend(max_tokens=64, num_pages=400))
    request = of_prompts([rng.integers(0, 900, 41)], 40)
    others = request.readouts.query_labels.copy()
    others[20] += 1
    other = every_token(request.item_ids, others)
    bare = submit(runner, replace(request, need_lse=False))
    run(runner)
    assert bare.future.result().lse is None
    assert computed(runner, request) == 41
    assert computed(runner, request) == 1
    assert computed(runner, replace(request, readouts=other)) == 41 - 20


@pytest.mark.parametrize("max_tokens", [40, 300])
def test_prompts_that_share_beginnings_are_a_tree(max_tokens):
    """Two contexts of several choices each; one choice is the beginning of another."""
    rng = np.random.default_rng(0)
    heads = [rng.integers(0, 900, n).tolist() for n in (33, 30)]
    prompts = [head + rng.integers(0, 900, n).tolist() for n in (1, 5, 2) for head in heads]
    prompts += [prompts[3] + [7, 8], prompts[2]]
    request = of_prompts(prompts)
    runner = Runner(TapeBackend(max_tokens=max_tokens, num_pages=200))
    tokens = computed(runner, request)
    if max_tokens == 40:  # a family has to fit a batch
        assert 120 < tokens < sum(map(len, prompts))
    else:
        assert tokens < 100
        assert tokens == plan_items(request, runner.backend.limits).num_tokens


@pytest.mark.parametrize("query", [False, True])
@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("spoilt", [0, 2, 4])
def test_a_chunk_that_is_not_finite_runs_again(spoilt, always, query):
    """The spoilt chunk and what was launched since on its pages run again, but no earlier chunk."""
    backend = TapeBackend(max_tokens=32, num_pages=128)
    plain, steps = backend.run, []

    def run_spoilt(batch):
        scores = plain(batch)
        steps.append(batch)
        if len(steps) == spoilt + 1 or (always and len(steps) > spoilt):
            scores.lse[3] = np.nan
        return scores

    backend.run = run_spoilt
    runner = Runner(backend)
    rng = np.random.default_rng(0)
    request = of_prompts([rng.integers(0, 900, 150)], 140) if query else request_of(rng, [150])
    ticket = submit(runner, request)
    run(runner)
    if always:
        assert isinstance(ticket.future.exception(), NonfiniteScore)
        return
    check(ticket)
    assert runner.counters().nonfinite_rows == 1
    assert 150 < sum(batch.num_tokens for batch in backend.batches) <= 150 + 2 * 32
    if query:
        assert computed(runner, request) == 10, "what was kept is fine"


def test_greedy_is_exactly_the_best_token():
    """Logits of labels and of best tokens are summed in different orders, so either may be
    larger."""
    labels = np.array([7, 5, 5, 9, 3], np.int32)
    logits = np.array([1.0000001, 2, 2, 3, 4.0000005], np.float32)
    best_ids = np.array([7, 5, 6, 1, 4], np.int32)
    best = np.array([1, 2, 2, 4, 4], np.float32)
    lse = np.array([5, 5, 5, 5, 4], np.float32)
    tops = (best_ids[:, None], best[:, None])
    result = ScoreResult((logits,), lse, *tops, 5, Timings(0, 0, 0))
    positions = position_logprobs(result, [labels])
    assert (positions.label == positions.top[:, 0]).tolist() == [True, True, False, False, False]
    assert (positions.label <= positions.top[:, 0]).all()
    assert (positions.top[:, 0] <= 0).all()
    np.testing.assert_allclose(positions.label, [-4, -3, -3, -2, 0], atol=1e-6)
    np.testing.assert_allclose(positions.top[:, 0], best - lse, atol=1e-6)


def test_a_token_is_among_the_best_exactly_if_its_number_is():
    labels = np.array([7, 5, 5], np.int32)
    logits = np.array([2.0000002, 1.0000001, 1.5], np.float32)
    top_ids = np.array([[3, 7], [1, 2], [1, 5]], np.int32)
    top = np.array([[3, 2], [2, 1], [2, 1.5]], np.float32)
    result = ScoreResult((logits,), np.full(3, 9, np.float32), top_ids, top, 3, Timings(0, 0, 0))
    positions = position_logprobs(result, [labels])
    assert positions.label[0] == positions.top[0, 1]
    assert positions.label[1] < positions.top[1, 1]
    assert positions.label[2] == positions.top[2, 1]
    np.testing.assert_allclose(positions.label, [-7, -8, -7.5], atol=1e-6)


def test_a_request_that_does_not_hold_together():
    request = request_of(np.random.default_rng(0), [3, 4])
    with pytest.raises(ValueError, match="do not add up to the labels"):
        replace(request, label_ids=request.label_ids[::-1])
    ids, read = request.item_ids[0], request.readouts
    with pytest.raises(ValueError, match="an entry for the query"):
        replace(request, readouts=replace(read, counts=read.counts[1:]))
    with pytest.raises(ValueError, match="21 top tokens"):
        replace(request, num_top=21)
    for places in ([0, 1, 3], [1, 0, 2], [0, 0, 1], [-1, 0, 1], [0, 1]):
        others = (read.places[0], np.array(places, np.int32), read.places[2])
        with pytest.raises(ValueError, match="ascending order"):
            replace(request, readouts=replace(read, places=others))
    assert replace(request, query_ids=ids).num_rows == 7
    rows = every_token(request.item_ids, ids)
    assert replace(request, query_ids=ids, readouts=rows).num_rows == 10
    assert replace(request, query_ids=NO_TOKENS).num_rows == 7
