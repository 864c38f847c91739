"""A `PackedBatch` as one array of a fixed size, so that few programs serve all batches."""

import numpy as np

from gpuscore.backends.jax.layout import (
    ProgramSizes,
    Rows,
    Tables,
    Tiles,
    TileSizes,
    buffer_length,
    divided,
    fill,
    page_entries,
)
from gpuscore.types.batch import Int32Array, PackedBatch


def padded(batch: PackedBatch, sizes: ProgramSizes, page_size: int, statistics: int) -> Int32Array:
    """Return the array of a batch, for a program of these sizes, which must be large enough.

    `divided` returns its tables. It holds at most `sizes.labels` labels, those of the first rows.
    """
    buffer = np.zeros(buffer_length(sizes), np.int32)
    tables = divided(buffer, sizes)
    max_labels = sizes.labels
    segment_of = np.repeat(np.arange(len(batch.parent)), np.diff(batch.cu_seqlens))  # [T]
    requests = np.unique(batch.request_of)
    requests = requests[batch.prefix_lens[requests] > 0]
    numbered = np.full(len(batch.prefix_lens), -1, np.int32)
    numbered[requests] = np.arange(len(requests))
    rows = Rows(
        place=np.arange(batch.num_tokens, dtype=np.int32),
        position=batch.positions,
        request=numbered[batch.request_of[segment_of]],
    )
    runs = _runs(batch.slot_mapping, page_size)
    fill(tables.token_ids, batch.token_ids)
    fill(tables.positions, batch.positions)
    fill(tables.seen_until, _seen_until(batch)[segment_of])
    for table, values in zip(
        (tables.run_rows, tables.run_slots, tables.run_lens), runs, strict=True
    ):
        fill(table, values)
    _fill_prefixes(tables, batch, requests, sizes.tiling, page_size=page_size)
    for tiles, chosen in ((tables.all_rows, rows.place), (tables.scored, batch.score_rows)):
        _fill_tiles(tiles, batch, segment_of, rows, chosen=chosen, sizes=sizes)
    fill(tables.label_rows, batch.label_rows[:max_labels])
    fill(tables.label_ids, batch.label_token_ids[:max_labels])
    counts = (
        batch.num_tokens,
        len(batch.score_rows),
        len(runs[0]),
        min(len(batch.label_token_ids), max_labels),
    )
    for number, count in zip(tables.numbers, (*counts, statistics), strict=True):
        number[0] = count
    return buffer


def _seen_until(batch: PackedBatch) -> np.ndarray:
    """Return for each segment the end of its descendants, which in preorder follow it directly."""
    segment_ends = batch.cu_seqlens[1:]
    ancestor = batch.parent
    ends = segment_ends.copy()
    while (ancestor >= 0).any():
        np.maximum.at(ends, ancestor[ancestor >= 0], segment_ends[ancestor >= 0])
        ancestor = np.where(ancestor >= 0, batch.parent[ancestor], -1)
    return ends


def _runs(slots: Int32Array, page_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, slots and lengths of the runs of rows in consecutive slots of one page."""
    rows = np.flatnonzero(slots >= 0)
    kept = slots[rows]
    begins = np.ones(len(rows), dtype=np.bool_)
    follows = (np.diff(rows) == 1) & (np.diff(kept) == 1)
    begins[1:] = ~follows | (kept[1:] % page_size == 0)
    firsts = np.flatnonzero(begins)
    return rows[firsts], kept[firsts], np.diff(np.append(firsts, len(rows)))


def _fill_prefixes(
    tables: Tables, batch: PackedBatch, requests: np.ndarray, tiling: TileSizes, page_size: int
) -> None:
    lens = batch.prefix_lens[requests]
    entries = page_entries(lens, tiling, page_size)
    fill(tables.prefix_lens, lens)
    blocks = np.cumsum(entries) // tiling.prefix_pages
    tables.block_starts[1:] = blocks[-1] if len(blocks) else 0
    fill(tables.block_starts[1:], blocks)
    of_request = np.repeat(np.arange(len(requests)), entries)
    places = np.arange(len(of_request)) - (np.cumsum(entries) - entries)[of_request]
    last = (-(-lens // page_size) - 1)[of_request]
    fill(tables.pages, batch.page_table[requests[of_request], np.minimum(places, last)])


def _fill_tiles(
    tiles: Tiles,
    batch: PackedBatch,
    segment_of: np.ndarray,
    every: Rows,
    chosen: Int32Array,
    sizes: ProgramSizes,
) -> None:
    """Divide the chosen rows of a batch into tiles."""
    if not len(chosen):
        return
    rows = Rows(*(values[chosen] for values in every))
    bounds = tiles.bounds
    for table, values in zip(tiles.rows, rows, strict=True):
        table[:] = values[-1]
        fill(table, values)
    starts = np.arange(0, len(chosen), sizes.tiling.rows)
    has_prefix = rows.request >= 0
    fill(bounds.position, np.minimum.reduceat(rows.position, starts))
    fill(bounds.request_stop, np.maximum.reduceat(rows.request, starts) + 1)
    first = np.where(has_prefix, rows.request, np.iinfo(np.int32).max)
    first = np.minimum.reduceat(first, starts)
    fill(bounds.request_start, np.minimum(first, bounds.request_stop[: len(starts)]))
    seen = _seen_blocks(batch, segment_of, chosen, sizes)
    tile, block = np.nonzero(seen)
    fill(tiles.blocks, block)
    stops = np.cumsum(np.bincount(tile, minlength=len(bounds.block_stop)))
    bounds.block_stop[:] = stops
    bounds.block_start[1:] = stops[:-1]


def _seen_blocks(
    batch: PackedBatch, segment_of: np.ndarray, chosen: Int32Array, sizes: ProgramSizes
) -> np.ndarray:
    """Return bool [tiles, blocks]: whether a block holds a key that a row of the tile sees."""
    keys = sizes.tiling.batch_keys
    segments = len(batch.parent)
    tile = np.arange(len(chosen)) // sizes.tiling.rows
    segment = segment_of[chosen]
    begins = np.flatnonzero(np.diff(tile * segments + segment, prepend=-1))
    stop = np.maximum.reduceat(chosen, begins) + 1  # rows see their own segment up to here
    tile = tile[begins]
    segment = segment[begins]
    ends = np.zeros((sizes.tokens // sizes.tiling.rows, sizes.tokens // keys + 1), np.int32)
    while len(segment):
        np.add.at(ends, (tile, batch.cu_seqlens[segment] // keys), 1)
        np.add.at(ends, (tile, -(-stop // keys)), -1)
        above = batch.parent[segment]
        pairs = np.unique((tile * segments + above)[above >= 0])
        tile, segment = np.divmod(pairs, segments)
        stop = batch.cu_seqlens[segment + 1]
    seen: np.ndarray = ends.cumsum(axis=1)[:, :-1] > 0
    return seen
