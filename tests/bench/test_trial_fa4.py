"""Promise: the lists of full and masked blocks and both rules of the trial of FlashAttention 4 hold
every (row, key) pair that the mask rule makes visible, exactly once."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from trial_fa4 import FINE, PAGE, RULES, TOKENS, batch_of, block_lists

from gpuscore.backends.torch.attention.triton import layout_of
from gpuscore.types.batch import visible_rows
from gpuscore_kernels.extend_attention import build_tiles
from support.batches import random_batch


def times_seen(lists, rule, numbers, shape, keys):
    """Return how often the kernel computes each pair of a row and a key with a weight over 0."""
    seen = np.zeros((shape[0] + TOKENS, shape[1] + keys), dtype=np.int32)
    masked, full = zip(*lists[:2], strict=True), zip(*lists[2:], strict=True)
    for block, chosen in enumerate(zip(masked, full, strict=True)):
        rows = block * TOKENS + np.arange(TOKENS)[:, None]
        for is_full, (count, places) in enumerate(chosen):
            for place in places[:count]:
                columns = place * keys + np.arange(keys)
                seen[rows, columns] += is_full or rule(numbers, rows, columns)
    assert not seen[: shape[0], shape[1] :].any()  # behind the last key
    return seen[: shape[0], : shape[1]]


def holds(batch, first, rule, keys):
    """Return whether a rule, with the lists of rows from `first` on, is the mask rule."""
    evaluate, numbers = RULES[rule]
    rows = np.arange(first, batch.num_tokens, dtype=np.int32)
    table = build_tiles(layout_of(batch, PAGE), FINE, rows=rows)
    lists = block_lists(table, keys, batch.num_tokens)
    wanted = visible_rows(batch)[first:]
    seen = times_seen(lists, evaluate, numbers(batch, first), wanted.shape, keys)
    return np.array_equal(seen, wanted)


@pytest.mark.parametrize("keys", [64, 80, 128])
@pytest.mark.parametrize("sizes", [(200, 30, 7), (64, 3, 180), (1, 1, 1), (129, 64, 2)])
@pytest.mark.parametrize("rule", RULES)
def test_a_query_and_items(rule, sizes, keys):
    query = sizes[0]
    batch = batch_of(*sizes, cached=False)
    assert holds(batch, 0, rule, keys)
    assert holds(batch, query, rule, keys)  # the query is cached, and gathered


@pytest.mark.parametrize("seed", range(6))
def test_trees_of_any_depth_of_several_requests(seed):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, 2048, 16)
    batch = replace(batch, prefix_lens=np.zeros_like(batch.prefix_lens))
    for first in (0, int(rng.integers(batch.num_tokens))):
        assert holds(batch, first, "keys", 80)


def test_numbers_of_rows_refuse_deeper_trees():
    batch = batch_of(3, 4, 2, cached=False)
    deep = replace(batch, parent=np.array([-1, 0, 1, 0, 0], dtype=np.int32))
    with pytest.raises(ValueError, match="has a parent"):
        RULES["rows"][1](deep, 0)


def test_most_blocks_of_the_large_request_are_full():
    table = build_tiles(layout_of(batch_of(2000, 500, 20, cached=False), PAGE), FINE)
    masked, _, full, _ = block_lists(table, 128, 12_000)
    # Counted from the mask itself, which a test has no time to build.
    assert (int(full.sum()), int(masked.sum())) == (2580, 406)
