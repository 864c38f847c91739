"""Promise: tile tables hold every (row, key) pair that the mask rule makes visible, exactly
once."""

from itertools import product

import numpy as np
import pytest

from gpuscore.backends.torch.attention.tiled import layout_of
from gpuscore.types.batch import Prefix, Segment, pack, visible_rows
from gpuscore_kernels.extend_attention.config import config_of
from gpuscore_kernels.extend_attention.table import (
    BATCH_ROW,
    FIRST_ROW,
    MASKED_AFTER,
    MASKED_END,
    MASKED_START,
    NUM_PACKED,
    POOL_END,
    POOL_START,
    POSITION,
    QUERY_ROW,
    SAME,
    SHARED,
    TileShape,
)
from gpuscore_kernels.extend_attention.tiles import TableBuilder
from support.batches import Pages, int32, item_segments, random_batch
from support.slow import slow

PAGE, SLOTS = 16, 2048
STEADY = TileShape(3, 16, 16, is_steady=True)
SHAPES = [STEADY, TileShape(8, 16, 4), TileShape(32, 8, 8), TileShape(1, 4, 2)]


def wanted(batch, rows, window):
    """Return each row's keys by position: slots as they are, rows of the batch numbered from SLOTS
    on."""
    seen = visible_rows(batch)
    segment_of = np.repeat(np.arange(len(batch.parent)), np.diff(batch.cu_seqlens))
    keys_of = {}
    for index, row in enumerate(rows):
        segment = segment_of[row]
        request = batch.request_of[segment]
        slots = [
            (i, batch.page_table[request, i // PAGE] * PAGE + i % PAGE)
            for i in range(batch.prefix_lens[request])
        ]
        packed = np.flatnonzero(seen[row])
        own = sorted((batch.positions[j], SLOTS + j) for j in packed)
        edge = batch.positions[row] - (window or 10**9)
        keys_of[index] = [key for position, key in slots + own if position > edge]
    return keys_of


def looked_at(table):
    """Return each row's keys: steady ones in the order in which the kernel reads them."""
    size, keys_of = table.shape.keys, {}
    for tile in table.tiles:
        row_start, count, before, after, end, pool, pool_end, packed, parent = tile[:9]
        rows = table.rows[:, row_start : row_start + count]
        full = [slot + np.arange(size) for slot in table.pool_tiles[pool:pool_end]]
        for i in range(packed):
            base = tile[9] if i < parent else tile[10]
            full.append(SLOTS + base + i * size + np.arange(size))
        for row in rows.T:
            seen = masked_keys(table, slice(before, after), row)
            seen += [int(key) for keys in full for key in keys]
            seen += masked_keys(table, slice(after, end), row)
            assert row[QUERY_ROW] not in keys_of
            keys_of[int(row[QUERY_ROW])] = seen
    return keys_of


def masked_keys(table, entries, row):
    return [
        int(start + c + SLOTS * packed)
        for start, count, first, segment, packed in table.masked[entries]
        for c in range(count)
        if sees(row, first + c, segment, table.window)
    ]


def sees(row, key, segment, window):
    """Return whether a row sees a masked key."""
    newest = row[BATCH_ROW] if segment == SAME else row[POSITION]
    oldest = newest + 1 - (window or 10**9)
    if segment == SAME:
        oldest = max(oldest, row[FIRST_ROW])
    return oldest <= key <= newest and segment in (SAME, SHARED, row[FIRST_ROW])


def holds(table, batch, rows, window):
    """Return whether each row has its keys once, no other; steady ones by position."""
    got, expected = looked_at(table), wanted(batch, rows, window)
    if not table.shape.is_steady:
        got, expected = ({row: sorted(x) for row, x in keys.items()} for keys in (got, expected))
    return bool(got == expected)


def check(batch, shape, rows=None, window=None):
    (table,) = TableBuilder(layout_of(batch, PAGE), shape).tables([rows], window)
    rows = np.arange(batch.num_tokens) if rows is None else rows
    assert holds(table, batch, rows, window)
    assert table.tiles.dtype == table.masked.dtype == table.rows.dtype == np.int32
    masked_only = window is None
    assert not masked_only or (table.tiles[:, MASKED_START] == table.tiles[:, MASKED_AFTER]).all()
    return table


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("seed", [1, *slow(0, 2)])  # the first has trees of depth 4
def test_every_visible_pair_once(seed, window, shape):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, SLOTS, PAGE)
    check(batch, shape, window=window)
    check(batch, shape, rows=rng.permutation(batch.score_rows), window=window)
    every_third = np.arange(batch.num_tokens, dtype=np.int32)[::3]
    check(batch, shape, rows=every_third, window=window)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("seed", [1, *slow(*range(2, 12))])
def test_tables_that_are_built_together_are_as_alone(seed, window):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, SLOTS, PAGE)
    nothing = np.empty(0, np.int32)
    choices = [rng.permutation(batch.score_rows), nothing, None, batch.score_rows[:1], None]
    for shape in SHAPES:
        layout = layout_of(batch, PAGE)
        together = TableBuilder(layout, shape).tables(choices, window)
        for rows, table in zip(choices, together, strict=True):
            assert_equal(table, *TableBuilder(layout, shape).tables([rows], window))


def assert_equal(table, other):
    for part in ("rows", "tiles", "pool_tiles", "masked"):
        ours, theirs = getattr(table, part), getattr(other, part)
        assert ours.dtype == theirs.dtype == np.int32
        np.testing.assert_array_equal(ours, theirs)


def query_and_items(prefix, query, items, page=PAGE):
    """Return a batch with a query chunk behind `prefix` cached tokens, and its items."""
    pages = Pages.shuffled(np.random.default_rng(0), SLOTS // page, page)
    parent = [Segment(int32(range(query)), prefix, 0)] if query else []
    tokens = [list(range(n)) for n in items]
    segments = item_segments(tokens, prefix + query, 0, 0 if query else -1, labels=[1])
    return pack(
        parent + segments, [Prefix(prefix, pages.of(0, prefix, room=32 if page > PAGE else 24))]
    )


TINY = [TileShape(2, 4, 4), TileShape(3, 4, 2), TileShape(2, 4, 4, is_steady=True)]


@pytest.mark.parametrize("shape", TINY, ids=str)
@pytest.mark.parametrize("prefix", [3, *slow(0, 1, 2, 4, 5, 8, 9)])
def test_all_small_batches(prefix, shape):
    """Prefix, query and two items leave every possible remainder in tiles of 4."""
    for query, first, second in product(range(6), range(6), range(6)):
        if query + first + second:
            items = [length for length in (first, second, 1) if length]
            batch = query_and_items(prefix, query, items)
            check(batch, shape, window=None)
            check(batch, shape, rows=batch.score_rows)
            check(batch, shape, window=3)


# A query and items, how many: steps with full and with masked tiles of keys, all tiles of a KV head
# of Qwen3-0.6B on an H100, and the most steps of a tile.
STEPS = {
    "120 + 10 x 180": (0, 120, [180] * 10, 122, 124, 5),
    "2,000 + 500 x 20": (0, 2000, [20] * 500, 10664, 689, 33),
    "500 x 20 on a cached query": (2000, 0, [20] * 500, 9703, 626, 33),
    "300": (0, 300, [], 20, 10, 5),
}


@pytest.mark.parametrize("workload", STEPS)
def test_steps(workload):
    cached, query, items, full, masked, longest = STEPS[workload]
    config = config_of(90, 128, 2)
    layout = layout_of(query_and_items(cached, query, items, page=64), 64)
    (table,) = TableBuilder(layout, config.shape(group=2)).tables([None])
    assert steps_of(table) == (full, masked, longest)


def steps_of(table):
    """Return how many full and masked tiles of keys all tiles read, and the most of a tile."""
    tiles = table.tiles
    full = tiles[:, POOL_END] - tiles[:, POOL_START] + tiles[:, NUM_PACKED]
    masked = tiles[:, MASKED_END] - tiles[:, MASKED_START]
    return int(full.sum()), int(masked.sum()), int((full + masked).max())


def test_no_rows():
    batch = query_and_items(5, 7, [2, 3])
    table = check(batch, SHAPES[0], rows=np.empty(0, np.int32))
    assert len(table.tiles) == 0
    nothing = pack([], [])
    assert len(check(nothing, SHAPES[0]).tiles) == 0


def test_prefix_pages_are_shared_by_all_tiles():
    table = check(query_and_items(64, 0, [5] * 9), TileShape(8, 16, 16))
    assert len(table.pool_tiles) == 4
    assert (table.tiles[:, POOL_START] == 0).all()
    assert (table.tiles[:, POOL_END] == 4).all()


def test_tiles_that_cross_pages_are_refused():
    layout = layout_of(query_and_items(5, 7, [2]), PAGE)
    for shape in (TileShape(4, 32, 16), TileShape(4, 12, 4), TileShape(4, 16, 5)):
        with pytest.raises(ValueError, match="does not fit pages of 16"):
            TableBuilder(layout, shape)
