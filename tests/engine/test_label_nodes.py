"""Promise: labels of several tokens get the sum of their tokens' log-probabilities, whatever form
the engine gives them, and nothing that they share is computed twice."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from msgspec import structs

from gpuscore.backends.base import OutOfMemory
from gpuscore.engine.engine import Engine
from gpuscore.engine.plan import plan_items
from gpuscore.errors import InsufficientMemory
from gpuscore.types.request import LabelTrie, ScoreRequest, most_tokens
from gpuscore.types.results import label_logprobs, label_mass, label_scores
from support.slow import slow
from support.tape_backend import TapeBackend, tape_logit, tape_lse

# Mixed lengths, shared first tokens, a label that begins another, one that is there twice.
LABELS = ((12, 7, 5), (12, 8), (9,), (12,), (12, 7, 5, 4), (9,), (3, 3, 3))
NODES = 5  # 12, 12 7, 12 7 5, 3, 3 3; 9 needs none


def ints(*values):
    return np.array(values, np.int32)


def request_of(items, labels=LABELS, query=(1, 2, 3), **more):
    trie = LabelTrie(labels)
    ids = tuple(np.array(item, np.int32) for item in items)
    return ScoreRequest(
        np.array(query, np.int32), ids, (trie.first_ids,) * len(ids), True, trie=trie, **more
    )


def logprob(prompt, label):
    """Return a label's log-probability after a prompt, one token after the other."""
    total = 0.0
    for token in label:
        gain = np.float64(tape_logit(prompt, token)) - np.float64(tape_lse(prompt))
        total += min(gain, 0.0)
        prompt = [*prompt, token]
    return total


def expected(request):
    query = request.query_ids.tolist()
    labels = request.trie.sequences
    return np.array(
        [[logprob([*query, *item], label) for label in labels] for item in request.item_ids]
    )


def random_items(rng, count, longest=12):
    return [rng.integers(0, 900, int(n)).tolist() for n in rng.integers(1, longest, count)]


@contextmanager
def engine_of(backend=None, chunk=0, prefix_cache=True, **limits):
    backend = backend or TapeBackend(**limits)
    backend.limits = replace(backend.limits, deterministic_chunk=chunk)
    engine = Engine(backend, prefix_cache=prefix_cache)
    del backend.batches[:]  # of the check of the bits
    try:
        yield engine, backend
    finally:
        engine.close()


def answer(request, chunk=0, **limits):
    with engine_of(chunk=chunk, **limits) as (engine, _):
        return engine.score(request).result(30)


def test_a_trie_has_a_row_for_every_beginning_of_a_label():
    trie = LabelTrie(LABELS)
    assert trie.paths() == [[12], [12, 7], [12, 7, 5], [3], [3, 3]]
    assert [ids.tolist() for ids in trie.next_ids] == [[12, 9, 3], [7, 8], [5], [4], [3], [3]]
    assert trie.counted.tolist() == [2, 3, 6]
    assert (trie.num_rows, trie.longest) == (6, 4)
    flat = LabelTrie(((5,), (6,), (5,)))
    assert (flat.num_nodes, flat.counted.tolist()) == (0, [0, 1])
    for wrong in ((), ((1,), ())):
        with pytest.raises(ValueError, match="there must be a label"):
            LabelTrie(wrong)


# 8 tokens: fewer than an item and its nodes have; 24: some families fit; 400: all in one batch.
@pytest.mark.parametrize("max_tokens", [8, 24, 33, 400])
@pytest.mark.parametrize("count", [1, 2, 13])
@pytest.mark.parametrize("chunk", [0, 8])
def test_sums_of_log_probabilities(max_tokens, count, chunk):
    rng = np.random.default_rng(count)
    for query in ([], [1, 2, 3], rng.integers(0, 900, 41).tolist()):
        request = request_of(random_items(rng, count, 30), query=query)
        result = answer(request, chunk, max_tokens=max_tokens)
        logprobs = expected(request)
        assert logprobs.std() > 1
        got = label_logprobs(result)
        np.testing.assert_allclose(got, logprobs, atol=1e-3, rtol=0)
        scores = label_scores(result, apply_softmax=False, lengths=request.trie.lengths)
        lengths = [*map(len, LABELS)]
        np.testing.assert_allclose(scores, np.exp(logprobs / lengths), rtol=1e-3)


def out_of_memory(failing, step):
    return OutOfMemory("planted") if step == failing else None


@pytest.mark.parametrize("seeds", [range(30), *slow(range(30, 300))])
def test_random_labels_items_and_limits(seeds):
    """Few different tokens, so that labels share beginnings; some batches run out of memory."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        count = int(rng.integers(1, 9))
        labels = tuple(tuple(rng.integers(0, 3, n).tolist()) for n in rng.integers(1, 6, count))
        start = rng.integers(0, 900, int(rng.integers(0, 40))).tolist()
        items = random_items(rng, int(rng.integers(1, 8)), int(rng.choice([2, 10, 50])))
        items = [start + item if rng.random() < 0.7 else item for item in items]
        query = rng.integers(0, 900, int(rng.choice([0, 1, 20, 70]))).tolist()
        request = request_of(items, labels, query)
        most = int(rng.choice([16, 24, 60, 300]))
        # Not the first one, which fills pages: the tape refuses to read what was not written.
        failing = int(rng.integers(1, 4)) if most == 300 else -1
        backend = TapeBackend(max_tokens=most)
        with engine_of(backend, chunk=8 * (seed % 2)) as (engine, _):
            backend.fault = partial(out_of_memory, failing)
            try:
                result = engine.score(request).result(30)
            except InsufficientMemory:  # the batch could not be made smaller
                assert failing >= 0
                continue
        got, logprobs = np.array(label_logprobs(result)), expected(request)
        np.testing.assert_allclose(got, logprobs, atol=2e-3, rtol=0, err_msg=str(seed))
        distinct = {
            label
            for label in labels
            if not any(label[: len(other)] == other and label != other for other in labels)
        }
        counted = request.trie.counted if request.trie else []
        assert {labels[place] for place in counted} == distinct


def test_every_token_is_computed_once():
    rng = np.random.default_rng(0)
    request = request_of(random_items(rng, 9))
    with engine_of(max_tokens=400, prefix_cache=False) as (engine, backend):
        result = engine.score(request).result(30)
    computed = sum(batch.num_tokens for batch in backend.batches)
    assert computed == request.num_tokens == 3 + sum(map(len, request.item_ids)) + 9 * NODES
    assert result.computed_tokens == computed - 9 * NODES, "tokens of labels are no prompt's"


def test_items_that_begin_alike_share_it_and_keep_their_nodes():
    rng = np.random.default_rng(1)
    start = rng.integers(0, 900, 40).tolist()
    items = [start + rng.integers(0, 900, 3).tolist() for _ in range(8)] + [[7]]
    request = request_of(items, query=[])
    with engine_of(max_tokens=1000) as (engine, backend):
        result = engine.score(request).result(30)
    np.testing.assert_allclose(label_logprobs(result), expected(request), atol=1e-3, rtol=0)
    distinct = len({tuple(item[:n]) for item in items for n in range(1, len(item) + 1)})
    computed = sum(batch.num_tokens for batch in backend.batches)
    assert computed - 9 * NODES == distinct
    assert result.computed_tokens == computed - 9 * NODES


@pytest.mark.parametrize("chunk", [0, 8])
def test_what_no_pass_computed_is_known_where_nodes_are_whole_prompts(chunk):
    rng = np.random.default_rng(2)
    items = [rng.integers(0, 900, n).tolist() for n in (21, 30, 5)]
    request = request_of(items, query=range(8))  # whole pages, which longer items need not repeat
    result = answer(request, chunk, max_tokens=24)
    assert result.computed_tokens == 8 + 56
    assert request.num_prompt_tokens == 3 * 8 + 56


@pytest.mark.parametrize(
    ("lengths", "chunk", "most"),
    [
        ((10, 20), 0, 3 + 30 + 2 * NODES),  # both fit
        ((10, 40), 0, 3 + 50 + 2 * NODES + 40 * NODES + 4),
        ((40,), 0, 3 + 40 + NODES),  # the only item moves to the query
        ((10, 20), 8, 3 + 30 + 2 * NODES + 30 * NODES + 2 * 4),
    ],
)
def test_the_tokens_of_a_form_are_known_before_it_is_made(lengths, chunk, most):
    request = request_of([[n] * length for n, length in enumerate(lengths)])
    limits = replace(TapeBackend(max_tokens=32).limits, deterministic_chunk=chunk)
    plan = plan_items(request, limits)
    assert most_tokens(request, limits) == plan.num_tokens == most
    families = [[*map(len, plan.item_ids[f.start : f.stop])] for f in plan.trees()]
    assert all(sum(family) <= 32 for family in families if len(family) > 1)


def test_progress_counts_the_callers_items():
    request, seen = request_of(random_items(np.random.default_rng(3), 11)), []
    with engine_of(max_tokens=24) as (engine, _):
        engine.score(request, seen.append).result(30)
    assert seen == sorted(seen)
    assert seen[-1] == 11
    assert max(seen[:-1]) < 11


def test_a_family_needs_no_more_memory_than_there_is():
    """Every request that is admitted ends, however few pages there are."""
    for pages in range(8, 20):
        for length in (20, 30, 60):
            items = [[5] * length, [6] * (length - 3)][: 1 + pages % 2]
            with engine_of(max_tokens=24, num_pages=pages) as (engine, _):
                try:
                    engine.score(request_of(items)).result(30)
                except InsufficientMemory:
                    assert pages * 4 < 3 + length + 8


def test_a_mass_counts_no_label_that_continues_another():
    request = request_of([[1, 2]])
    (row,) = label_logprobs(answer(request))
    result = answer(request)
    small = np.log(np.array([0.5, 0.25, 0.125, 0.25, 0.1, 0.125, 0.0625], np.float32))
    result = structs.replace(result, label_logits=(small,), lse=np.zeros(1, np.float32))
    mass = label_mass(result, request.label_ids, request.trie)
    assert mass == pytest.approx([0.125 + 0.25 + 0.0625])
    assert row.shape == (7,)
