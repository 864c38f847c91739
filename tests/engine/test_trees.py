"""Promise: what items of a request share is computed once, and every answer stays the same."""

from dataclasses import replace

import numpy as np
import pytest

from gpuscore.engine.engine import Engine
from gpuscore.engine.plan import MAX_DEPTH, MIN_SHARED, plan_items
from gpuscore.types.request import ScoreRequest
from support.tape_backend import TapeBackend, tape_logit, tape_lse

ROOM = 10**6


def plan_of(request, most=ROOM):
    return plan_items(request, replace(TapeBackend().limits, max_tokens=most), trees_per_batch=1)


def request_of(items, query=(1, 2, 3)):
    labels = tuple(np.array([n % 7, 5], np.int32) for n in range(len(items)))
    ids = tuple(np.array(item, np.int32) for item in items)
    return ScoreRequest(np.array(query, np.int32), ids, labels, need_lse=True)


def distinct(items):
    """Number of different beginnings of all items: the tokens of their radix tree."""
    return len({tuple(item[:n]) for item in items for n in range(1, len(item) + 1)})


def prompts_of(plan):
    """Return the tokens after the query of each of the request's items."""
    prompt_of, prompts = {}, []
    for number, (item, parent) in enumerate(zip(plan.item_ids, plan.parents, strict=True)):
        prompts.append((prompts[parent] if parent >= 0 else []) + item.tolist())
        prompt_of |= dict.fromkeys(plan.rows_of(number), prompts[-1])
    return [prompt_of[n] for n in range(len(prompt_of))]


def grid(rng, heads, tails, head=100, tail=20):
    """Items that are each a head and a tail, in a random order, all pairs once."""
    firsts = [rng.integers(0, 1000, head).tolist() for _ in range(heads)]
    lasts = [rng.integers(0, 1000, tail).tolist() for _ in range(tails)]
    items = [first + last for first in firsts for last in lasts]
    return [items[n] for n in rng.permutation(len(items))]


def turns(rng, count):
    """Histories that each continue the one before by a turn, with two endings each."""
    history, items = [], []
    for _ in range(count):
        history = history + rng.integers(0, 1000, 30).tolist()
        items += [history + rng.integers(0, 1000, 5).tolist() for _ in range(2)]
    return items


@pytest.mark.parametrize("name", ["grid", "turns", "documents"])
def test_shared_prefixes_are_computed_once(name):
    rng = np.random.default_rng(0)
    items = {
        "grid": lambda: grid(rng, 4, 100),
        "turns": lambda: turns(rng, MAX_DEPTH),
        "documents": lambda: grid(rng, 50, 2, head=300, tail=3),
    }[name]()
    request = request_of(items)
    plan = plan_of(request)
    assert prompts_of(plan) == items
    assert sum(map(len, plan.item_ids)) <= 1.02 * distinct(items)
    for index, labels in enumerate(plan.label_ids):
        rows = plan.rows_of(index)
        assert bool(rows) == bool(len(labels))
        assert all(labels is request.label_ids[row] for row in rows)


def test_random_items_with_many_beginnings():
    """Equal items, items that are another's beginning, deep histories; families keep their size."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        pieces = [rng.integers(0, 3, int(n)).tolist() for n in rng.integers(1, 20, 4)]
        items = [
            sum((pieces[n] for n in rng.integers(0, 4, int(rng.integers(1, 14)))), [])
            for _ in range(int(rng.integers(2, 60)))
        ]
        most = int(rng.choice([60, 200, ROOM]))
        plan = plan_of(request_of(items), most)
        if plan.parents is None:
            continue
        assert prompts_of(plan) == items
        families = [[*map(len, plan.item_ids[f.start : f.stop])] for f in plan.trees()]
        assert max(sum(family) for family in families if len(family) > 1) <= most
        assert all(len(item) for item in plan.item_ids)
        depth = []
        for parent in plan.parents:
            depth.append(1 + depth[parent] if parent >= 0 else 0)
        assert max(depth) <= MAX_DEPTH


@pytest.mark.parametrize(
    "items",
    [
        [[1] * 15 + [2], [1] * 15 + [3]],  # saves 15 tokens
        [[1] * (MIN_SHARED - 1) + [n] for n in range(9)],
        [[1] * 30 + [2] * 150, [1] * 30 + [3] * 150],  # for many rows
        [[1] * 30],
        [[n, *[1] * 30] for n in range(50)],  # only ends are shared
        [[1] * 16, [1] * 16],  # one token of each stays its own
    ],
)
def test_nothing_worth_sharing(items):
    request = request_of(items)
    plan = plan_of(request)
    assert (plan.item_ids, plan.label_ids) == (request.item_ids, request.label_ids)
    assert plan.parents is None


def test_the_engine_computes_them_once_and_answers_in_the_given_order():
    rng = np.random.default_rng(1)
    items = grid(rng, 3, 12, head=40, tail=4) + [[7] * 70, [8]]
    request = request_of(items)
    engine = Engine(TapeBackend(max_tokens=256, num_pages=256))
    result = engine.score(request).result(30)
    assert result.computed_tokens <= 3 + 1.02 * distinct(items) + 3 * 40  # some families in two
    for index, item in enumerate(items):
        prompt = [1, 2, 3, *item]
        expected = [tape_logit(prompt, int(label)) for label in request.label_ids[index]]
        assert result.label_logits[index].tolist() == expected
        assert result.lse[index] == tape_lse(prompt)
    engine.close()
