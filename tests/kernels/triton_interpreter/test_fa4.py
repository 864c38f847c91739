"""Promise: with `--attention fa4` the numbers of keys and the lists of full and masked blocks hold
every (row, key) pair that the mask rule makes visible, exactly once, in batches of any kind.

A stand-in computes by them what the compiled kernel computes (`support.fa4_stand_in`); the kernel
itself is compared on a card (`tests/backends/test_gpu_fa4.py`).
"""

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from gpuscore.backends.torch.attention import fa4
from gpuscore.backends.torch.buckets import Bucket
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.types.batch import prefix_slots, visible_rows
from gpuscore_kernels import hopper_attention
from gpuscore_kernels.hopper_attention.kernel import KEYS, ROWS
from support.attention_inputs import heads_alone, requests
from support.batches import random_batch
from support.fa4_stand_in import kernel
from support.kernels import DEVICE, INTERPRETED, in_triton, planted
from support.poison import check_neighbours, poisoned
from support.slow import slow

lists = importlib.import_module("gpuscore_kernels.hopper_attention.triton")

PAGE, SLOTS = 16, 2048
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in is for a CPU")


def on_device(batch, group, room):
    """Return sizes and lists, with this much room beside what the batch needs."""
    config = heads_alone(2 * group, 2, 64)
    pool = KVPool(config, SLOTS // PAGE, PAGE, torch.float32, torch.device(DEVICE))
    attention = fa4.HopperAttention(config, pool, kernel)
    (table,) = attention.tables(batch)
    tokens, tiles, scored = room
    sizes = Bucket(
        batch.num_tokens + tokens, attention.tiles([table]) + tiles, len(batch.score_rows) + scored
    )
    (place,) = attention.places(sizes, 16)
    words = np.full(place.end + 3, -77, np.int32)
    assert place.write(table, words, place.end) == place.end
    assert (words[:16] == -77).all()
    assert (words[place.end :] == -77).all()
    return sizes, attention.on_device((place,), torch.from_numpy(words))


def times_seen(blocks, rows, group):
    """Return how often a row gets each key, by the lists and numbers."""
    numbers, *others = (x.numpy() for x in blocks)
    tokens = ROWS // group
    seen = np.zeros((rows + tokens, numbers.shape[1]), np.int32)
    for is_full, counts, places in ((False, *others[:2]), (True, *others[2:])):
        for tile, count in enumerate(counts):
            row = tile * tokens + np.arange(tokens)[:, None]
            assert (np.diff(places[tile, :count]) > 0).all()
            for block in places[tile, :count]:
                key = block * KEYS + np.arange(KEYS)
                seen[row, key] += is_full | ((row >= numbers[0, key]) & (row < numbers[1, key]))
    return seen[:rows]


def check(batch, group, room=(0, 0, 0)):
    """Compare every pair with the rule, also of the rows of the last layer."""
    sizes, made = on_device(batch, group, room)
    rule, slots = visible_rows(batch), made.read.numpy()
    assert len(slots) == sizes.tiles * KEYS
    request = batch.request_of.repeat(np.diff(batch.cu_seqlens))
    for blocks, rows, count in zip(
        made.blocks,
        (np.arange(batch.num_tokens), batch.score_rows),
        (sizes.tokens, sizes.scored),
        strict=True,
    ):
        seen = times_seen(blocks, count, group)
        assert not seen[len(rows) :].any()
        seen = seen[: len(rows)]
        np.testing.assert_array_equal(seen[:, : batch.num_tokens], rule[rows])
        assert not seen[:, batch.num_tokens : sizes.tokens].any()
        cached = seen[:, sizes.tokens : sizes.tokens + len(slots)]
        assert not seen[:, sizes.tokens + len(slots) :].any()
        for row, of_row in zip(rows, cached, strict=True):
            wanted = prefix_slots(batch, request[row], PAGE)
            np.testing.assert_array_equal(slots[of_row > 0], wanted)
            assert of_row.max(initial=0) <= 1
    # What a block holds beside cached keys is finite.
    used = (slots >= 0).sum()
    assert (slots[used : used + KEYS - 1] == fa4.ZEROS).all()


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(6))
def test_trees_of_any_depth_of_several_requests(seed, group):
    rng = np.random.default_rng(seed)
    check(random_batch(rng, SLOTS, PAGE), group)
    check(random_batch(rng, SLOTS, PAGE), group, (int(rng.integers(300)), 3, 70))


@pytest.mark.parametrize(
    "sizes",
    [
        ((0, 300, [20] * 9),),
        ((300, 0, [5] * 40),),
        ((1, 1, [1]), (0, 0, [1])),
        ((130, 70, []), (16, 0, [200, 3]), (128, 129, [1, 64])),
    ],
)
def test_chunks_items_and_cached_prefixes(sizes):
    batch = requests(*sizes, page_size=PAGE, num_pages=SLOTS // PAGE)
    check(batch, 2)
    check(batch, 2, (13, 2, 65))


def test_requests_with_the_same_prefix_side_by_side_share_its_copy():
    one = requests((40, 0, [3]), (40, 0, [5, 2]), page_size=PAGE, num_pages=SLOTS // PAGE)
    batch = replace(one, page_table=one.page_table[[0, 0]])
    assert (len(fa4.key_table(one, PAGE).slots), len(fa4.key_table(batch, PAGE).slots)) == (80, 40)
    check(one, 2)
    check(batch, 2)
    apart = replace(one, request_of=np.array([0, 1, 0], np.int32))  # a request in two places
    check(apart, 2)


def test_a_block_is_full_where_all_rows_of_a_tile_see_all_of_it():
    batch = requests((0, 900, [20] * 40), page_size=PAGE, num_pages=SLOTS // PAGE)
    _, made = on_device(batch, 2, (0, 0, 0))
    rule, tokens = visible_rows(batch), ROWS // 2
    tiles = [rule[i : i + tokens] for i in range(0, len(rule), tokens)]
    parts = [[tile[:, j : j + KEYS] for j in range(0, len(rule), KEYS)] for tile in tiles]
    whole = [[part.all() and part.shape[1] == KEYS for part in of_tile] for of_tile in parts]
    some = [[part.any() for part in of_tile] for of_tile in parts]
    blocks = made.blocks[0]
    np.testing.assert_array_equal(blocks.full_count, np.sum(whole, 1))
    np.testing.assert_array_equal(blocks.masked_count, np.sum(some, 1) - np.sum(whole, 1))


DEFECTS = [
    (fa4, "np.maximum.at(behind, above[below], ends[below])", "pass"),
    (fa4, "np.arange(batch.num_tokens), behind", "np.arange(batch.num_tokens) + 1, behind"),
    (fa4, "batch.score_rows + 1", "batch.score_rows"),
    (fa4, "bounds[run + 1]", "bounds[run + 1] - 1"),
    (fa4, "pages[request[first[run]], page]", "pages[request[first[run]] - 1, page]"),
    (fa4, "slots[used : used + KEYS] = ZEROS", "slots[used : used + KEYS] = UNUSED"),
    (fa4, "room[0], room[1] = NEVER, 0", "room[0], room[1] = 0, NEVER"),
    (lists, "begin <= first", "begin < behind"),
    (lists, "(end > first)", "(end > behind)"),
    (lists, "end >= behind", "end > first"),
    (lists, "tl.range(0, blocks, STEP)", "tl.range(0, blocks - STEP, STEP)"),
    (lists, "mask=chosen > 0", "mask=(chosen > 0) & (block > 0)"),
    (lists, "so_far += tl.sum(chosen, 0)", "so_far += tl.maximum(tl.sum(chosen, 0) - 1, 0)"),
]


@pytest.mark.parametrize(("module", "old", "new"), DEFECTS)
def test_a_defect_is_visible(module, old, new, monkeypatch, tmp_path):
    users = (fa4,) if module is fa4 else (hopper_attention,)
    sizes = (130, 700, []), (16, 0, [200, 3]), (128, 129, [1, 5])
    batch = requests(*sizes, page_size=PAGE, num_pages=SLOTS // PAGE)
    with planted(monkeypatch, module, old, new, tmp_path, users), pytest.raises(AssertionError):
        check(batch, 2, (5, 1, 70))


@pytest.mark.parametrize("kind", ["v", *slow("k", "kv")])
@pytest.mark.usefixtures("fa4_stands_in", "quick_start")
def test_neighbours_of_a_poisoned_request(kind, tiny_model, tmp_path):
    """Blocks hold keys of several requests, so values of all rows are checked, not of kept ones."""
    directory = poisoned(tiny_model("qwen3")[0], tmp_path / "model", kind)
    small = {"max_batch_tokens": 256, "max_model_len": 128}
    check_neighbours(in_triton(directory, attention="fa4", **small))
