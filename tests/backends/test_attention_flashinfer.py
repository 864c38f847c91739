"""Promise: the plans for FlashInfer, executed as its documentation describes, give every row the
keys of the mask rule."""

import re
from pathlib import Path

import numpy as np
import pytest

from gpuscore.backends.common.start_check import TREES, WITHOUT_QUERY, KnownRequests
from gpuscore.backends.torch.attention.flashinfer import lay_out_items
from gpuscore.types.batch import prefix_slots, visible_rows
from support.attention_inputs import requests
from support.batches import random_batch

PAGE, SLOTS = 16, 2048
HOPPER = [(128, 96), (192, 96), (128, 32)]  # rows and keys of FlashInfer's tiles
ROOT = Path(__file__).parents[2]
LOCK = ROOT / "docker" / "locks" / "cuda.txt"
STUB = ROOT / "stubs" / "flashinfer" / "__init__.pyi"


def batches():
    for seed in range(6):
        yield random_batch(np.random.default_rng(seed), SLOTS, PAGE)
    yield requests((0, 0, [1]), page_size=PAGE, num_pages=64)
    yield requests((9, 5, [3, 1]), (0, 7, [2]), (16, 0, [4]), page_size=PAGE, num_pages=64)
    yield requests((9, 5, []), page_size=PAGE, num_pages=64)
    yield requests((0, 0, [60] * 6), (8, 0, [60] * 6), (0, 0, [150]), page_size=PAGE, num_pages=64)


def key_numbers(plan, index):
    """Return the numbers of the keys that the buffer holds at a sequence's pages."""
    numbers = plan.keys[plan.starts[index] : plan.starts[index + 1]]
    buffer = np.concatenate((plan.slots, SLOTS + np.arange(len(plan.rows))))
    return buffer[numbers]


def rows_of(plan, index):
    return plan.rows[plan.queries[index] : plan.queries[index + 1]]


@pytest.mark.parametrize("batch", list(batches()), ids=lambda batch: str(batch.num_tokens))
def test_every_row_gets_the_keys_of_the_mask_rule(batch):
    """A row sees its sequence's keys up to its own; in an item only the prefix's and its item's."""
    plan, seen = lay_out_items(batch, PAGE), visible_rows(batch)
    assert sorted(plan.rows) == list(range(batch.num_tokens))
    request_of = np.repeat(batch.request_of, np.diff(batch.cu_seqlens))
    for index, prefix in enumerate(plan.prefix_lens):
        keys, rows = key_numbers(plan, index), rows_of(plan, index)
        for place, row in enumerate(rows, start=len(keys) - len(rows)):
            given = keys[: place + 1]
            if place >= prefix:
                position = int(plan.positions[index, place - prefix])
                assert position <= plan.longest[index]
                given = np.concatenate([given[:prefix], given[place + 1 - position :]])
            cached = prefix_slots(batch, request_of[row], PAGE)
            assert sorted(given) == sorted([*cached, *(SLOTS + np.flatnonzero(seen[row]))])


@pytest.mark.parametrize("sizes", HOPPER, ids=str)
@pytest.mark.parametrize("batch", list(batches()), ids=lambda batch: str(batch.num_tokens))
def test_kernels_for_hopper_read_the_tiles_that_rows_see(batch, sizes):
    of_rows, of_keys = sizes
    plan = lay_out_items(batch, PAGE)
    seen = visible_rows(batch)
    for index, prefix in enumerate(plan.prefix_lens):
        keys, rows = key_numbers(plan, index), rows_of(plan, index)
        before = len(keys) - len(rows)  # of them are cached, or those of ancestors
        own = keys - SLOTS
        for tile in range(-(-len(rows) // of_rows)):
            reach = tile * of_rows + before
            read = tiles_read(reach, len(keys), int(prefix), int(plan.longest[index]), sizes)
            for row in rows[tile * of_rows : (tile + 1) * of_rows]:
                wanted = np.flatnonzero((own < 0) | seen[row, np.maximum(own, 0)]) // of_keys
                assert set(wanted) <= set(read)
            assert min(read) >= 0


@pytest.mark.parametrize("sizes", HOPPER, ids=str)
def test_the_check_at_start_has_tiles_that_no_item_reaches(sizes):
    """They have no prefix, so they reveal kernels that read the tile before the first one."""
    batch = KnownRequests(100, 100, PAGE, (*TREES, WITHOUT_QUERY)).packed()
    plan = lay_out_items(batch, PAGE)
    (index,) = np.flatnonzero(plan.prefix_lens == 0)
    rows, longest = len(rows_of(plan, index)), int(plan.positions[index].max())
    read = [tiles_read(reach, rows, 0, longest, sizes) for reach in range(0, rows, sizes[0])]
    assert min(min(tiles) for tiles in read) == -1


def tiles_read(reach, keys, prefix, longest, sizes):
    """Return the numbers of the tiles of keys that FlashInfer's kernels for Hopper read, the last
    one first; as `kv_tile_idx_decrement` in attention/hopper/mainloop_mma.cuh of 0.7.

    Args:
        reach: place of the first row among all keys.
        keys, prefix, longest: of the sequence.
        sizes: rows and keys of a tile.
    """
    of_rows, of_keys = sizes
    read = [min(-(-keys // of_keys), -(-(reach + of_rows) // of_keys)) - 1]
    items, shared = max(0, reach - longest) // of_keys, -(-prefix // of_keys)
    while read[-1] > 0:
        jumps = read[-1] == items and items >= shared
        read.append(shared - 1 if jumps else read[-1] - 1)
    return read


def test_the_stub_is_of_the_locked_release():
    locked = re.search(r"^flashinfer-python==(\S+)", LOCK.read_text(), re.MULTILINE)
    assert f"flashinfer-python=={locked[1]};" in STUB.read_text(), "copy the new signatures"
