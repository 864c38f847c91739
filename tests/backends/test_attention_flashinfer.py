"""Promise: the plans for FlashInfer, executed as its documentation describes, give every row the
keys of the mask rule."""

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpuscore.backends.common.start_check import TREES, WITHOUT_QUERY, KnownRequests
from gpuscore.backends.torch.attention.choice import attention_factory
from gpuscore.backends.torch.attention.flashinfer import lay_out_items
from gpuscore.backends.torch.attention.tiled import TorchAttention
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.types.batch import visible_rows
from gpuscore_kernels.extend_attention.reference import extend_attention
from support.attention_inputs import heads_alone, inputs, relative_error, requests
from support.batches import random_batch
from support.flashinfer_stand_in import STUB, Items, stub

PAGE, SLOTS = 16, 2048
HOPPER = [(128, 96), (192, 96), (128, 32)]  # rows and keys of FlashInfer's tiles
LOCK = Path(__file__).parents[2] / "docker" / "locks" / "cuda.txt"
STAND_IN = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Items)


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


@pytest.mark.parametrize("batch", list(batches()), ids=lambda batch: str(batch.num_tokens))
def test_calls_of_the_locked_release_score_as_the_mask_rule_says(batch, monkeypatch):
    """The wrapper is a stand-in, whose arguments are bound to the release's signatures."""
    monkeypatch.setitem(sys.modules, "flashinfer", STAND_IN)
    config = heads_alone(4, 2, 8)
    pool = KVPool(config, SLOTS // PAGE, PAGE, torch.float32, torch.device("cpu"))
    arrays = inputs(batch, PAGE, SLOTS // PAGE, (4, 2), 8, torch.float32)
    for layer in pool.layers:
        for side, values in zip(layer, (arrays.pool_k, arrays.pool_v), strict=True):
            side.copy_(values)
    exact = TorchAttention(config, pool, extend_attention).prepare(batch)
    tested = attention_factory("flashinfer", extend_attention, False)(config, pool).prepare(batch)
    for layer, q in enumerate((arrays.q, arrays.q[batch.score_rows.astype(np.int64)])):
        if len(q):
            expected = exact.run(layer, q, arrays.k, arrays.v)
            assert relative_error(tested.run(layer, q, arrays.k, arrays.v), expected) < 1e-5


def test_the_stub_is_of_the_locked_release():
    locked = re.search(r"^flashinfer-python==(\S+)", LOCK.read_text(), re.MULTILINE)
    assert f"flashinfer-python=={locked[1]};" in STUB.read_text(), "copy the new signatures"


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer")
def test_the_stub_is_of_the_installed_release():
    import flashinfer

    owners = [each.BatchPrefillWithPagedKVCacheWrapper for each in (flashinfer, stub())]
    for method in ("__init__", "plan"):
        parameters = (inspect.signature(getattr(owner, method)) for owner in owners)
        assert len({tuple(each.parameters) for each in parameters}) == 1
