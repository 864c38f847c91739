"""Promise: in every layer `TorchPass` computes what the oracle of the mask rule computes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpuscore.backends.torch.attention.layout import lay_out_attention, padded_length
from gpuscore.backends.torch.attention.operators import TorchAttention
from gpuscore.backends.torch.kv_pool import KeptRows, KVPool
from gpuscore.types.batch import Prefix, Segment, pack
from gpuscore_kernels.partial_attention import merge_partials
from support.attention_inputs import heads_alone
from support.attention_oracle import attention as oracle
from support.batches import int32, item_segments, random_batch
from support.slow import slow

PAGE_SIZE, NUM_SLOTS = 4, 512
HEADS, KV_HEADS, DIM = 4, 2, 16
CONFIG = heads_alone(HEADS, KV_HEADS, DIM)
CPU = torch.device("cpu")
IMPLEMENTATIONS = ("cpu", "reference")


def poisoned_pool(batch, generator):
    """Return a pool with random keys and values in the cached slots and NaN everywhere else, page
    tails included."""
    pool = KVPool(CONFIG, NUM_SLOTS // PAGE_SIZE, PAGE_SIZE, torch.float32, CPU)
    cached = [
        batch.page_table[r, i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE
        for r, length in enumerate(batch.prefix_lens)
        for i in range(length)
    ]
    for sides in pool.layers:
        for side in sides:
            values = torch.randn(side.shape, generator=generator)
            side.fill_(torch.nan)
            side[:, cached] = values[:, cached]
    return pool


def as_oracle(side):
    return side.permute(1, 0, 2).double().numpy()


def run(batch, seed, window=None, softcap=None):
    """Run all layers of CONFIG on random q, k, v against the oracle; the last layer gives only the
    scored rows."""
    generator = torch.Generator().manual_seed(seed)
    pool = poisoned_pool(batch, generator)
    before = [[as_oracle(side) for side in sides] for sides in pool.layers]
    q, k, v = (
        torch.randn(batch.num_tokens, heads, DIM, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    config = replace(CONFIG, windows=(window, window), attention_softcap=softcap)
    stored = KeptRows.of(batch.slot_mapping, pool)
    rows = torch.from_numpy(batch.score_rows.astype(np.int64))
    exact = [x.double().numpy() for x in (q, k, v)]
    for layer, scored in ((0, None), (1, rows)):
        expected = oracle(batch, PAGE_SIZE, *exact, *before[layer], window, softcap)
        expected = expected if scored is None else expected[batch.score_rows]
        stored.write(layer, k, v)
        for impl in IMPLEMENTATIONS:
            attend = TorchAttention(config, pool, impl, merge_partials).prepare(batch)
            got = attend.run(layer, q if scored is None else q[scored], k, v).numpy()
            np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5, err_msg=impl)
    return pool, k, v


@pytest.mark.parametrize("seed", [*range(5), *slow(*range(5, 12))])
def test_random_batches(seed):
    batch = random_batch(np.random.default_rng(seed), NUM_SLOTS, PAGE_SIZE)
    if not batch.num_tokens:
        return
    pool, k, v = run(batch, seed)
    kept = batch.slot_mapping >= 0
    for layer in pool.layers:
        for side, values in zip(layer, (k, v), strict=True):
            stored = side[:, batch.slot_mapping[kept]].permute(1, 0, 2)
            assert torch.equal(stored, values[torch.from_numpy(kept)])


@pytest.mark.parametrize(
    ("window", "softcap"),
    [
        *((1, None), (5, 0.7), (40, None)),
        *slow((1, 0.7), (5, None), (40, 0.7)),
        *slow(*((window, softcap) for window in (2, 17, 1000) for softcap in (None, 0.7))),
    ],
)
def test_windows_count_positions_not_rows(window, softcap):
    for seed in range(2):
        batch = random_batch(np.random.default_rng(seed), NUM_SLOTS, PAGE_SIZE)
        if batch.num_tokens:
            run(batch, seed, window, softcap)


def test_a_soft_cap_without_a_window():
    batch = random_batch(np.random.default_rng(5), NUM_SLOTS, PAGE_SIZE)
    run(batch, 5, None, 0.3)


@pytest.mark.parametrize("window", [None, 3])
def test_rows_in_the_middle_of_a_segment_can_be_scored(window):
    batch = random_batch(np.random.default_rng(5), NUM_SLOTS, PAGE_SIZE)
    rows = np.arange(batch.num_tokens, dtype=np.int32)[::3]
    run(replace(batch, score_rows=rows), 0, window)


def test_padding_is_bounded():
    for length in range(1, 5000):
        padded = padded_length(length)
        assert length <= padded <= max(length + 3, length * 5 // 4)
    assert len({padded_length(n) for n in range(1, 5000)}) < 50


def consecutive(lengths):
    """Return a batch of a query and items of these lengths behind 7 tokens on pages 5 and 6."""
    prefix, slots = Prefix(7, int32([5, 6])), int32([27, *range(40, 49)])
    query = Segment(int32([1] * 10), 7, 0, slots=slots)
    items = item_segments([[1] * n for n in lengths], 17, 0, 0, [3])
    return pack([query, *items], [prefix])


@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 7, 5], [5], [1, 1]])
def test_consecutive_rows_and_slots_stay_in_place(lengths):
    """Segments of equal length are neither copied nor filled up, and score as with copies."""
    batch = consecutive(lengths)
    layout = lay_out_attention(batch, PAGE_SIZE, None, CPU)
    first = layout.dense[0]
    assert first.run == slice(20, 27)
    in_place = [group.rows for group in layout.causal if isinstance(group.rows, slice)]
    assert slice(0, 10) in in_place
    if len(set(lengths)) == 1:
        assert slice(10, 10 + sum(lengths)) in in_place
        assert {group.length for group in layout.causal} == {10, lengths[0]}
    pool, k, v = run(batch, 0)
    written = pool.layers[1][0][:, [27, *range(40, 49)]]
    torch.testing.assert_close(written, k[:10].transpose(0, 1))


def test_cached_slots_are_read_once_for_all_items_with_items_below_them():
    """Otherwise each item with labels of several tokens would cost a pass over the whole query."""
    pages = np.arange(5, dtype=np.int32)
    segments = []
    for item in range(3):
        segments += [Segment(int32([1, 2, 3]), 17, 0, label_ids=int32([5]))]
        segments += [Segment(int32([7]), 20, 0, len(segments) - 1, label_ids=int32([5 + item]))]
    batch = pack(segments, [Prefix(17, pages)])
    layout = lay_out_attention(batch, PAGE_SIZE, None, CPU)
    for passes, rows in ((layout.dense, 12), (layout.scored_dense, 6)):
        reading = [part for part in passes if len(part.slots)]
        assert [call.count for part in reading for call in part.calls] == [rows]
        assert len(passes) == 1 + 3, "and one pass over each item"
