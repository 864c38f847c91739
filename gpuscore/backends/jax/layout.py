"""A `PackedBatch` as arrays of fixed sizes, so that few programs serve all batches.

Only the number of tokens is padded to a bucket. How long items are, how many rows are scored, how
many requests there are and how far prefixes reach are bounds of loops, which are data: the rows of
a batch fall into tiles, and each tile says which keys any of its rows may see.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gpuscore.arrays import Int32Array
from gpuscore.batch import PackedBatch

# Only whole tiles of a bucket are computed, so its empty part costs little.
SMALLEST_BUCKET, GROWTH = 64, 8


Ints: TypeAlias = Any  # int32: NumPy's arrays on the host, JAX's in a program


@dataclass(frozen=True, slots=True)
class TileSizes:
    """How many rows and keys the loops of a program take at a time."""

    rows: int  # of queries; divides every bucket
    own_keys: int  # of this batch; divides every bucket
    prefix_pages: int


@dataclass(frozen=True, slots=True)
class ProgramSizes:
    """The sizes that a program is compiled for."""

    tokens: int  # a bucket; also the most requests and scored rows
    pages: int  # entries of the prefixes' page lists, of all requests together
    tiling: TileSizes


class Rows(NamedTuple):
    """Query rows, and what they may see of the batch; each [rows]."""

    place: Ints  # in the batch
    position: Ints
    own_start: Ints  # first row of the row's own segment
    parent_start: Ints  # rows of its parent, an empty range where there is none
    parent_stop: Ints
    request: Ints  # entry of the prefixes' tables


class Bounds(NamedTuple):
    """Half-open ranges that hold all that the rows of a tile may see, each [tiles]."""

    own_start: Ints  # blocks of the batch's rows: their own segments
    own_stop: Ints
    parent_start: Ints  # blocks of the batch's rows: their parents
    parent_stop: Ints
    request_start: Ints  # requests with a prefix
    request_stop: Ints
    position: Ints  # the smallest of them


class Tile(NamedTuple):
    """`TileSizes.rows` query rows."""

    rows: Rows
    bounds: Bounds  # each []


class Tiles(NamedTuple):
    """All tiles of some rows; the last row is repeated to fill up."""

    rows: Rows  # each [tiles * rows]
    bounds: Bounds
    number: Ints  # [] of tiles that hold a row


class Tables(NamedTuple):
    """A padded batch; T is the bucket, and its tables have room for T requests."""

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    slots: Ints  # [T] where keys and values are kept; past the last slot: nowhere
    prefix_lens: Ints  # [T] of each request
    prefix_blocks: Ints  # [T] blocks of pages that it takes
    page_starts: Ints  # [T] where its pages begin in `pages`
    pages: Ints  # [P]
    every: Tiles  # all rows
    scored: Tiles  # score_rows


def buckets(max_tokens: int, rows: int) -> tuple[int, ...]:
    """A few sizes up to the limit, each a multiple of `rows`, or less and a power of two."""
    sizes, size = [], SMALLEST_BUCKET
    while size < max_tokens:
        sizes.append(size)
        size *= GROWTH
    if max_tokens > rows:
        return (*sizes, -(-max_tokens // rows) * rows)
    return (*sizes, max(SMALLEST_BUCKET, 1 << (max_tokens - 1).bit_length()))


def num_pages(batch: PackedBatch, page_size: int) -> int:
    """Entries that the page lists of a batch take."""
    return int((-(-batch.prefix_lens // page_size)).sum())


def padded(batch: PackedBatch, sizes: ProgramSizes, page_size: int, num_slots: int) -> Tables:
    """The batch for a program of these sizes, which must be large enough for it."""
    bucket, tiling = sizes.tokens, sizes.tiling
    used, request_of = np.unique(batch.request_of, return_inverse=True)
    lens = batch.prefix_lens[used]
    page_starts, pages = _page_lists(batch, used, page_size)
    rows, sees_prefix = _rows(batch, request_of, lens)
    slots = np.where(batch.slot_mapping < 0, num_slots, batch.slot_mapping)
    return Tables(
        token_ids=_filled(batch.token_ids, bucket),
        positions=_filled(batch.positions, bucket),
        slots=_filled(slots, bucket, num_slots),
        prefix_lens=_filled(lens, bucket),
        prefix_blocks=_filled(-(-lens // (tiling.prefix_pages * page_size)), bucket),
        page_starts=_filled(page_starts, bucket),
        pages=_filled(pages, sizes.pages),
        every=_tiles(rows, sees_prefix, np.arange(batch.num_tokens), sizes),
        scored=_tiles(rows, sees_prefix, batch.score_rows, sizes),
    )


def _rows(
    batch: PackedBatch, request_of: np.ndarray, prefix_lens: Int32Array
) -> tuple[Rows, np.ndarray]:
    """All rows of the batch, and which of them see a prefix."""
    lengths = np.diff(batch.cu_seqlens)
    segment_of = np.repeat(np.arange(len(lengths)), lengths)  # [T]
    parent = batch.parent[segment_of]
    starts, stops = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
    rows = Rows(
        place=np.arange(batch.num_tokens, dtype=np.int32),
        position=batch.positions,
        own_start=starts[segment_of],
        parent_start=np.where(parent < 0, 0, starts[parent]),
        parent_stop=np.where(parent < 0, 0, stops[parent]),
        request=request_of[segment_of],
    )
    return rows, prefix_lens[rows.request] > 0


def _tiles(every: Rows, sees_prefix: np.ndarray, chosen: np.ndarray, sizes: ProgramSizes) -> Tiles:
    """Tiles of the chosen rows of a batch, with room for a whole bucket of them."""
    rows = Rows(*(values[chosen] for values in every))
    tile, keys = sizes.tiling.rows, sizes.tiling.own_keys
    starts = np.arange(0, len(chosen), tile)

    def least(values: np.ndarray, among: np.ndarray | None = None) -> Int32Array:
        values = values if among is None else np.where(among, values, np.iinfo(np.int32).max)
        return _filled(np.minimum.reduceat(values, starts) if len(starts) else starts, room)

    def most(values: np.ndarray, among: np.ndarray | None = None) -> Int32Array:
        """Where there are none at all the range is empty, because this is 0."""
        values = values if among is None else np.where(among, values, 0)
        return _filled(np.maximum.reduceat(values, starts) if len(starts) else starts, room)

    room = sizes.tokens // tile
    has_prefix, has_parent = sees_prefix[chosen], rows.parent_stop > 0
    bounds = Bounds(
        own_start=least(rows.own_start // keys),
        own_stop=most(rows.place // keys + 1),
        parent_start=least(rows.parent_start // keys, has_parent),
        parent_stop=most(-(-rows.parent_stop // keys), has_parent),
        request_start=least(rows.request, has_prefix),
        request_stop=most(rows.request + 1, has_prefix),
        position=least(rows.position),
    )
    filled = (_filled(x, sizes.tokens, int(x[-1]) if len(chosen) else 0) for x in rows)
    return Tiles(Rows(*filled), bounds, np.array(len(starts), np.int32))


def _page_lists(
    batch: PackedBatch, used: np.ndarray, page_size: int
) -> tuple[Int32Array, Int32Array]:
    """Where each request's pages begin, and those of all requests one after the other."""
    counts = -(-batch.prefix_lens[used] // page_size)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1])).astype(np.int32)
    width = batch.page_table.shape[1]
    return starts, batch.page_table[used][np.arange(width) < counts[:, None]]


def _filled(values: np.ndarray, size: int, fill: int = 0) -> Int32Array:
    """int32 [size]: the values, then `fill`."""
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out
