"""A `PackedBatch` as arrays of fixed sizes, so that few programs serve all batches.

Only the number of tokens is padded to a bucket. Lengths of items, and numbers of scored rows,
requests and cached tokens are bounds of loops, which are data: the rows of a batch are divided into
tiles, and each tile has the range of keys that any of its rows may see.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gpuscore.arrays import Int32Array
from gpuscore.batch import PackedBatch

# Only tiles that hold a row are computed, so the empty part of a bucket costs little.
SMALLEST_BUCKET, GROWTH = 64, 8


Ints: TypeAlias = Any  # int32: NumPy's arrays on the host, JAX's in a program


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Rows and keys that one iteration of a program's loops computes."""

    rows: int  # query rows; divides every bucket
    own_keys: int  # keys of this batch; divides every bucket
    prefix_pages: int  # pages of cached keys


@dataclass(frozen=True, slots=True)
class ProgramSizes:
    """The sizes that a program is compiled for."""

    tokens: int  # a bucket; also the most requests and scored rows
    pages: int  # entries of the prefixes' page lists, of all requests together
    tiling: TileSizes


class Rows(NamedTuple):
    """Query rows, and the rows of the batch that they may see; each [rows]."""

    place: Ints  # in the batch
    position: Ints
    branch_start: Ints  # first row of its own segment, or of its ancestor below the root
    root_start: Ints  # rows of its root; an empty range if there is none
    root_stop: Ints
    request: Ints  # entry of the prefixes' tables


class Bounds(NamedTuple):
    """Half-open ranges that hold everything that the rows of a tile may see, each [tiles]."""

    branch_start: Ints  # blocks of the batch's rows: their branches, up to themselves
    branch_stop: Ints
    root_start: Ints  # blocks of the batch's rows: their roots
    root_stop: Ints
    request_start: Ints  # requests with a prefix
    request_stop: Ints
    position: Ints  # smallest position of its rows


class Tile(NamedTuple):
    """`TileSizes.rows` query rows."""

    rows: Rows
    bounds: Bounds  # each []


class Tiles(NamedTuple):
    """All tiles of some rows; padding repeats the last row."""

    rows: Rows  # each [tiles * rows]
    bounds: Bounds
    number: Ints  # [] number of tiles that hold a row


class Tables(NamedTuple):
    """A padded batch; T is the bucket, and its tables have room for T requests."""

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    seen_until: Ints  # [T] first later row that does not continue the row's segment
    slots: Ints  # [T] KV slots; one past the last slot = not kept
    prefix_lens: Ints  # [T] cached tokens of each request
    prefix_blocks: Ints  # [T] blocks of pages that they take
    page_starts: Ints  # [T] first entry of its pages in `pages`
    pages: Ints  # [P]
    every: Tiles  # all rows
    scored: Tiles  # score_rows


def buckets(max_tokens: int, rows: int) -> tuple[int, ...]:
    """Return a few sizes; the last one holds `max_tokens`.

    Each is a multiple of `rows`, or a power of two below it.
    """
    sizes, size = [], SMALLEST_BUCKET
    while size < max_tokens:
        sizes.append(size)
        size *= GROWTH
    if max_tokens > rows:
        return (*sizes, -(-max_tokens // rows) * rows)
    return (*sizes, max(SMALLEST_BUCKET, 1 << (max_tokens - 1).bit_length()))


def num_pages(batch: PackedBatch, page_size: int) -> int:
    """Number of entries in the page lists of a batch."""
    return int((-(-batch.prefix_lens // page_size)).sum())


def padded(batch: PackedBatch, sizes: ProgramSizes, page_size: int, num_slots: int) -> Tables:
    """Pad the batch for a program of these sizes, which must be large enough for it."""
    bucket, tiling = sizes.tokens, sizes.tiling
    used, request_of = np.unique(batch.request_of, return_inverse=True)
    lens = batch.prefix_lens[used]
    page_starts, pages = _page_lists(batch, used, page_size)
    rows, sees_prefix = _rows(batch, request_of, lens)
    slots = np.where(batch.slot_mapping < 0, num_slots, batch.slot_mapping)
    return Tables(
        token_ids=_filled(batch.token_ids, bucket),
        positions=_filled(batch.positions, bucket),
        seen_until=_filled(_seen_until(batch), bucket),
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
    """Return all rows of the batch, and a mask of those that see a prefix."""
    lengths = np.diff(batch.cu_seqlens)
    segment_of = np.repeat(np.arange(len(lengths)), lengths)  # [T]
    root, branch = (x[segment_of] for x in _roots(batch))
    starts, stops = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
    rows = Rows(
        place=np.arange(batch.num_tokens, dtype=np.int32),
        position=batch.positions,
        branch_start=starts[branch],
        root_start=np.where(root < 0, 0, starts[root]),
        root_stop=np.where(root < 0, 0, stops[root]),
        request=request_of[segment_of],
    )
    return rows, prefix_lens[rows.request] > 0


def _roots(batch: PackedBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return the root of each segment (-1 = none), and its ancestor below that, or itself; [S]."""
    root, branch = batch.parent, np.arange(len(batch.parent))
    while (deeper := (root >= 0) & (batch.parent[root] >= 0)).any():
        branch = np.where(deeper, root, branch)
        root = np.where(deeper, batch.parent[root], root)
    return root, branch


def _seen_until(batch: PackedBatch) -> np.ndarray:
    """Return for each row [T] the end of its segment's descendants, which see all of the segment.

    In preorder they follow it directly.
    """
    own, above = batch.cu_seqlens[1:], batch.parent
    ends = own.copy()
    while (above >= 0).any():
        np.maximum.at(ends, above[above >= 0], own[above >= 0])
        above = np.where(above >= 0, batch.parent[above], -1)
    return np.repeat(ends, np.diff(batch.cu_seqlens))


def _tiles(every: Rows, sees_prefix: np.ndarray, chosen: np.ndarray, sizes: ProgramSizes) -> Tiles:
    """Divide the chosen rows of a batch into tiles, with room for a whole bucket of rows."""
    rows = Rows(*(values[chosen] for values in every))
    tile, keys = sizes.tiling.rows, sizes.tiling.own_keys
    starts = np.arange(0, len(chosen), tile)

    def least(values: np.ndarray, among: np.ndarray | None = None) -> Int32Array:
        values = values if among is None else np.where(among, values, np.iinfo(np.int32).max)
        return _filled(np.minimum.reduceat(values, starts) if len(starts) else starts, room)

    def most(values: np.ndarray, among: np.ndarray | None = None) -> Int32Array:
        """Return each tile's maximum; 0 if no row is `among`, so that the range is empty."""
        values = values if among is None else np.where(among, values, 0)
        return _filled(np.maximum.reduceat(values, starts) if len(starts) else starts, room)

    room = sizes.tokens // tile
    has_prefix, has_root = sees_prefix[chosen], rows.root_stop > 0
    bounds = Bounds(
        branch_start=least(rows.branch_start // keys),
        branch_stop=most(rows.place // keys + 1),
        root_start=least(rows.root_start // keys, has_root),
        root_stop=most(-(-rows.root_stop // keys), has_root),
        request_start=least(rows.request, has_prefix),
        request_stop=most(rows.request + 1, has_prefix),
        position=least(rows.position),
    )
    filled = (_filled(x, sizes.tokens, int(x[-1]) if len(chosen) else 0) for x in rows)
    return Tiles(Rows(*filled), bounds, np.array(len(starts), np.int32))


def _page_lists(
    batch: PackedBatch, used: np.ndarray, page_size: int
) -> tuple[Int32Array, Int32Array]:
    """Return the first entry of each request's pages, and all requests' pages in one list."""
    counts = -(-batch.prefix_lens[used] // page_size)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1])).astype(np.int32)
    width = batch.page_table.shape[1]
    return starts, batch.page_table[used][np.arange(width) < counts[:, None]]


def _filled(values: np.ndarray, size: int, fill: int = 0) -> Int32Array:
    """Return int32 [size]: the values, then `fill`."""
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out
