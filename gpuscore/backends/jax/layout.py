"""The tables of a padded batch, and the loops that they bound.

`padding` fills them. A program is compiled for one bucket, a padded number of tokens. All other
sizes, such as lengths of items or numbers of scored rows, are data that bound the program's loops:
the rows of a batch are divided into tiles, and each tile has a list of the blocks of keys that any
of its rows may see.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gpuscore.types.batch import Int32Array

# Only tiles that hold a row are computed, so the empty part of a bucket costs little.
SMALLEST_BUCKET = 64
GROWTH = 8
LABELS_PER_TOKEN = 2  # labels that the batch's own program computes, per token of the bucket


Ints: TypeAlias = Any  # int32: NumPy arrays on the host, JAX arrays in a program


@dataclass(frozen=True, slots=True)
class TileSizes:
    """The rows and keys that one iteration of a program's loops computes."""

    rows: int  # query rows of attention; divides every bucket
    batch_keys: int  # keys of the batch; divides every bucket, and is at least a page
    prefix_pages: int  # pages of cached keys
    # Rows of one matrix product, the largest first; each divides the bucket. A size is used while
    # at least three quarters of so many rows are left.
    product_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProgramSizes:
    """The sizes that a program is compiled for."""

    tokens: int  # a bucket; also the most scored rows
    pages: int  # entries of the prefixes' page lists, of all requests together
    tiling: TileSizes

    @property
    def requests(self) -> int:
        """Most requests with a prefix; each takes at least a block of pages."""
        return min(self.tokens, self.pages // self.tiling.prefix_pages)

    @property
    def labels(self) -> int:
        """Labels that the batch's own program computes; the others are computed after it."""
        return LABELS_PER_TOKEN * self.tokens


class Numbers(NamedTuple):
    """Numbers of a batch; each [1]."""

    rows: Ints
    scored: Ints  # scored rows
    runs: Ints
    labels: Ints
    statistics: Ints  # NOTHING, ONE or MANY of `label_head`


class Rows(NamedTuple):
    """Query rows; each [rows]."""

    place: Ints  # in the batch
    position: Ints
    request: Ints  # entry of the prefixes' tables; -1 = no prefix


class Bounds(NamedTuple):
    """Half-open ranges that hold everything that the rows of a tile may see, each [tiles]."""

    block_start: Ints  # entries of `Tiles.blocks`
    block_stop: Ints
    request_start: Ints  # requests with a prefix
    request_stop: Ints
    position: Ints  # smallest position of its rows


class Tiles(NamedTuple):
    """All tiles of some rows, of `TileSizes.rows` each; padding repeats the last row."""

    rows: Rows  # each [T]
    bounds: Bounds
    blocks: Ints  # blocks of the batch's rows, `TileSizes.batch_keys` each; ascending in a tile


RowTiles: TypeAlias = tuple[Tiles, Any]  # the tiles of some rows, and the rows' number, int32 []


class Tables(NamedTuple):
    """A padded batch of at most T rows, the bucket, and R requests with a prefix."""

    numbers: Numbers
    token_ids: Ints  # [T]
    positions: Ints  # [T]
    # [T] the first row after the row's segment and its descendants. These are consecutive, because
    # segments are in preorder: row i sees row j if and only if j <= i < seen_until[j].
    seen_until: Ints
    run_rows: Ints  # [T] first row of each run of rows that are kept in consecutive slots of a page
    run_slots: Ints  # [T] slot of that row
    run_lens: Ints  # [T]
    prefix_lens: Ints  # [R] cached tokens of each request with a prefix
    block_starts: Ints  # [R + 1] first block of its pages; a block is `prefix_pages` pages
    pages: Ints  # [P] of all requests with a prefix; the last page of each fills its last block
    all_rows: Tiles  # of all rows
    scored: Tiles  # of score_rows
    label_rows: Ints  # [labels] scored row of each label
    label_ids: Ints  # [labels]


def buckets(max_tokens: int, rows: int) -> tuple[int, ...]:
    """Return a few sizes; the last one holds `max_tokens`.

    Each is a multiple of `rows`, or a power of two below it.
    """
    sizes = []
    size = SMALLEST_BUCKET
    while size < max_tokens:
        sizes.append(size)
        size *= GROWTH
    if max_tokens > rows:
        return (*sizes, -(-max_tokens // rows) * rows)
    return (*sizes, max(SMALLEST_BUCKET, 1 << (max_tokens - 1).bit_length()))


def page_entries(lengths: np.ndarray, tiling: TileSizes, page_size: int) -> Int32Array:
    """Return the entries of `Tables.pages` for prefixes of these lengths, in whole blocks."""
    blocks = -(-lengths // (tiling.prefix_pages * page_size))
    return (blocks * tiling.prefix_pages).astype(np.int32)


def divided(buffer: Ints, sizes: ProgramSizes) -> Tables:
    """Return the tables in a batch's array: views of it in NumPy, slices in a program."""
    start = 0

    def take(length: Any) -> Any:
        nonlocal start
        if isinstance(length, tuple):
            return type(length)(*map(take, length))
        start += length
        return buffer[start - length : start]

    return Tables(*map(take, _lengths(sizes)))


def fill(table: Ints, values: np.ndarray) -> None:
    """Write the first entries of a table."""
    table[: len(values)] = values


def buffer_length(sizes: ProgramSizes) -> int:
    """Number of entries of a batch's array."""
    return sum(_leaves(_lengths(sizes)))


def product_tiles(rows: Ints, tiling: TileSizes) -> Iterator[tuple[Ints, Ints]]:
    """Yield for each size of `TileSizes.product_rows` the first row and the number of its tiles."""
    first = 0
    last = tiling.product_rows[-1]
    for size in tiling.product_rows:
        left = (rows - first) * (rows > first)
        count = (left + (last - 1 if size == last else size // 4)) // size
        yield first, count
        first = first + count * size


def _lengths(sizes: ProgramSizes) -> Tables:
    """Return the number of entries of each table."""
    tokens = sizes.tokens
    tiling = sizes.tiling
    count = tokens // tiling.rows
    blocks = count * (tokens // tiling.batch_keys)
    tiles = Tiles(
        Rows(*(tokens,) * len(Rows._fields)), Bounds(*(count,) * len(Bounds._fields)), blocks
    )
    return Tables(
        numbers=Numbers(*(1,) * len(Numbers._fields)),
        **dict.fromkeys(("token_ids", "positions", "seen_until"), tokens),
        **dict.fromkeys(("run_rows", "run_slots", "run_lens"), tokens),
        prefix_lens=sizes.requests,
        block_starts=sizes.requests + 1,
        pages=sizes.pages,
        all_rows=tiles,
        scored=tiles,
        label_rows=sizes.labels,
        label_ids=sizes.labels,
    )


def _leaves(lengths: Any) -> Iterator[int]:
    for length in lengths:
        yield from _leaves(length) if isinstance(length, tuple) else (length,)
