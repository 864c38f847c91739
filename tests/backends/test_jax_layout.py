"""Promise: the tables of a padded batch bound exactly what the mask rule lets rows see."""

from dataclasses import replace

import numpy as np
import pytest

from gpuscore.backends.jax.launched import split
from gpuscore.backends.jax.layout import (
    ProgramSizes,
    TileSizes,
    divided,
    page_entries,
    product_tiles,
)
from gpuscore.backends.jax.padding import padded
from gpuscore.types.batch import Prefix, Segment, pack, page_slots, visible_rows
from support.batches import int32, item_segments, random_batch

PAGE, SLOTS = 4, 512
SIZES = ProgramSizes(1024, 256, TileSizes(32, 16, 2, (256, 64)))
SEEDS = range(6)


def random_tables(seed):
    batch = random_batch(np.random.default_rng(seed), SLOTS, PAGE)
    return batch, divided(padded(batch, SIZES, PAGE, statistics=2), SIZES)


def by_tile(tiles, count):
    """Yield each tile's rows, and the blocks of the batch that it reads."""
    rows = SIZES.tiling.rows
    for index in range(-(-count // rows)):
        start, stop = tiles.bounds.block_start[index], tiles.bounds.block_stop[index]
        yield tiles.rows.place[index * rows : (index + 1) * rows], tiles.blocks[start:stop].tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_tiles_read_the_blocks_that_their_rows_see(seed):
    batch, tables = random_tables(seed)
    seen, keys = visible_rows(batch), SIZES.tiling.batch_keys
    for tiles, count in (
        (tables.all_rows, batch.num_tokens),
        (tables.scored, len(batch.score_rows)),
    ):
        for rows, blocks in by_tile(tiles, count):
            wanted = np.flatnonzero(seen[np.unique(rows)].any(axis=0)) // keys
            assert blocks == np.unique(wanted).tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_see_what_the_mask_rule_says(seed):
    batch, tables = random_tables(seed)
    row = np.arange(batch.num_tokens)
    until = tables.seen_until[: len(row)]
    np.testing.assert_array_equal(
        (row <= row[:, None]) & (until > row[:, None]), visible_rows(batch)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_runs_are_the_kept_slots(seed):
    """Each run stays in a page, and together they write every kept row once."""
    batch, tables = random_tables(seed)
    slots = np.full(batch.num_tokens, -1)
    for run in range(int(tables.numbers.runs[0])):
        row, slot, length = (x[run] for x in (tables.run_rows, tables.run_slots, tables.run_lens))
        assert slot // PAGE == (slot + length - 1) // PAGE
        assert (slots[row : row + length] == -1).all()
        slots[row : row + length] = np.arange(slot, slot + length)
    np.testing.assert_array_equal(slots, batch.slot_mapping)


@pytest.mark.parametrize("seed", SEEDS)
def test_prefixes_have_their_pages(seed):
    batch, tables = random_tables(seed)
    segment_of = np.repeat(np.arange(len(batch.parent)), np.diff(batch.cu_seqlens))
    for row, request in enumerate(tables.all_rows.rows.request[: batch.num_tokens]):
        original = batch.request_of[segment_of[row]]
        length = batch.prefix_lens[original]
        if request < 0:
            assert length == 0
            continue
        assert tables.prefix_lens[request] == length
        first, last = tables.block_starts[request : request + 2] * SIZES.tiling.prefix_pages
        count = -(-length // PAGE)
        assert last - first == -(-count // 2) * 2
        pages = batch.page_table[original, :count]
        assert tables.pages[first : first + count].tolist() == pages.tolist()
        assert (tables.pages[first + count : last] == pages[-1]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_batch_is_divided_between_trees(seed):
    batch = random_batch(np.random.default_rng(seed), SLOTS, PAGE)
    entries = page_entries(batch.prefix_lens, SIZES.tiling, PAGE)
    room = max(1, int(entries.max()))
    parts = list(split(batch, entries, room))
    for part in parts:
        assert entries[np.unique(part.request_of)].sum() <= room
        assert (part.parent < np.arange(len(part.parent))).all()
    for name in ("token_ids", "positions", "slot_mapping", "label_token_ids", "need_lse"):
        together = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(together, getattr(batch, name))
    seen, row = visible_rows(batch), 0
    for part in parts:
        stop = row + part.num_tokens
        np.testing.assert_array_equal(visible_rows(part), seen[row:stop, row:stop])
        assert not seen[row:stop, :row].any()
        row = stop
    assert sum(len(part.score_rows) for part in parts) == len(batch.score_rows)


def test_tiles_of_products_hold_every_row():
    """Large tiles are used while they are three quarters full, then small ones."""
    tiling = TileSizes(256, 256, 4, (2048, 512))
    for rows in range(16385):
        (start, large), (rest, small) = product_tiles(rows, tiling)
        assert (start, rest) == (0, large * 2048)
        assert large * 2048 + small * 512 >= rows > (large - 1) * 2048 + 1535 * (large > 0)
        assert small == max(0, -(-(rows - rest) // 512)) <= 3


def test_what_fits_is_not_divided():
    batch = random_batch(np.random.default_rng(1), SLOTS, PAGE)
    entries = page_entries(batch.prefix_lens, SIZES.tiling, PAGE)
    assert list(split(batch, entries, int(entries.sum()))) == [batch]


def test_labels_without_room_are_left_out():
    segment = Segment(int32([1]), 0, 0, label_ids=int32(range(3000)))
    batch = pack([segment, replace(segment, label_ids=int32([7]))], [Prefix(0, int32([]))])
    tables = divided(padded(batch, SIZES, PAGE, statistics=0), SIZES)
    assert int(tables.numbers.labels[0]) == SIZES.labels == len(tables.label_ids) == 2048
    assert tables.label_ids.tolist() == list(range(2048))


def test_a_page_that_was_begun_is_a_run_of_its_own():
    pages = int32([9, 2, 5])
    kept = Segment(int32([1] * 8), 3, 0, slots=page_slots(pages, 3, 11, PAGE))
    item = item_segments([[1] * 3], 11, 0, 0, [1])
    tables = divided(padded(pack([kept, *item], [Prefix(3, pages)]), SIZES, PAGE, 0), SIZES)
    count = int(tables.numbers.runs[0])
    assert tables.run_rows[:count].tolist() == [0, 1, 5]
    assert tables.run_slots[:count].tolist() == [39, 8, 20]
    assert tables.run_lens[:count].tolist() == [1, 4, 3]
