"""Tile tables, which tell the attention kernel the keys of each tile of queries; `upload` copies
several to a device at once, as one array of int32 words.

Tables are named tuples, cheaper to make than frozen dataclasses: small batches wait for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints: TypeAlias = NDArray[np.int32]
Wide: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

# Columns of `TileTable.tiles`.
(
    ROW_START,  # first row of the tile in `rows`
    NUM_ROWS,  # number of rows of the tile
    MASKED_START,  # masked[MASKED_START:MASKED_AFTER] are the masked tiles before the full ones
    MASKED_AFTER,  # masked[MASKED_AFTER:MASKED_END] are those after the full ones
    MASKED_END,
    POOL_START,  # in `pool_tiles`: full tiles of the cached prefix
    POOL_END,
    NUM_PACKED,  # number of full tiles of keys of this batch
    NUM_ROOT,  # how many of them, the first ones, are in the root segment
    ROOT_BASE,  # tile i < NUM_ROOT starts at row ROOT_BASE + i * keys
    SEGMENT_BASE,  # tile i >= NUM_ROOT starts at row SEGMENT_BASE + i * keys
) = range(11)
TILE_FIELDS = 11
# Columns of `TileTable.masked`. KEY_START: the first key's slot in the pool or row in the batch.
# KEY_POSITION: its position; where SEGMENT is SAME, its row in the batch.
KEY_START, NUM_KEYS, KEY_POSITION, SEGMENT, IS_PACKED = range(5)
MASKED_FIELDS = 5
# SEGMENT: the first row of the segment whose rows see the keys, or one of these.
SHARED = -1  # every row of the tile sees them
SAME = -2  # a row sees the keys of its own segment, up to itself
# Rows of `TileTable.rows`.
QUERY_ROW, BATCH_ROW, FIRST_ROW, POSITION = range(4)  # FIRST_ROW: the first row of its segment
ROW_FIELDS = 4


@dataclass(frozen=True, slots=True)
class TileShape:
    """Sizes of tiles; `keys` divides the page size and `masked_keys` divides `keys`."""

    rows: int  # tokens of a query tile; the kernel has a row for each token and head of a group
    keys: int  # of a full tile
    masked_keys: int  # of a masked tile
    # If True, a row's tiles do not depend on other rows: keys come in the order of positions, a
    # masked tile holds keys of one segment, and `masked_keys` equals `keys`.
    is_steady: bool = False


class Layout(NamedTuple):
    """Segments and pages of a batch: T tokens, S segments, R requests, P pages. All int32.

    A row sees its request's cached prefix, all of its segment's ancestors from the root down, and
    its segment up to itself. In this order the keys are at positions 0, 1, 2, ...
    """

    positions: Ints  # [T]
    cu_seqlens: Ints  # [S + 1]
    parent: Ints  # [S], -1 = none
    request_of: Ints  # [S]
    prefix_lens: Ints  # [R]
    page_table: Ints  # [R, P]
    page_size: int


class TileTable(NamedTuple):
    """The table that the kernel reads; M query rows, int32 throughout."""

    shape: TileShape
    window: int | None
    rows: Ints  # [ROW_FIELDS, M] in the order of tiles
    tiles: Ints  # [n, TILE_FIELDS], tiles with most keys first
    pool_tiles: Ints  # first slot of every full tile of a cached prefix
    masked: Ints  # [*, MASKED_FIELDS]


def ancestors_from_root(parent: Ints) -> list[Wide]:
    """Return each segment's root, then its ancestor below the root, and so on to its parent.

    Each array is [S], -1 = none. There is one for each ancestor of the deepest segment.
    """
    upwards: list[Wide] = []
    above = parent.astype(np.int64)
    while np.count_nonzero(above >= 0):
        upwards.append(above)
        above = np.where(above >= 0, parent[above], -1)
    if len(upwards) < 2:
        return upwards
    chain = np.stack(upwards)
    depth = np.count_nonzero(chain >= 0, axis=0)
    level = np.arange(len(chain))[:, None]
    from_root = np.take_along_axis(chain, np.maximum(depth - 1 - level, 0), axis=0)
    return [*np.where(level < depth, from_root, -1)]


WordsT = TypeVar("WordsT", Ints, Tensor)

ALIGNED = 16  # words; Triton compiles a second kernel for pointers not aligned to 16 bytes


@dataclass(frozen=True, slots=True)
class DeviceTiles:
    """The arrays of a `TileTable`, int32.

    `pool_tiles` and `masked` may also hold entries of other tables; `tiles` holds the ranges of
    this table's entries.
    """

    shape: TileShape
    window: int | None
    rows: Tensor  # [ROW_FIELDS, M]
    tiles: Tensor  # [n, TILE_FIELDS]
    pool_tiles: Tensor
    masked: Tensor

    def __post_init__(self) -> None:
        for array in (self.rows, self.tiles, self.pool_tiles, self.masked):
            if array.dtype != torch.int32:
                raise ValueError(f"a table's arrays must be int32, got {array.dtype}")


@dataclass(frozen=True, slots=True)
class TablePlace:
    """The place of a table in an array of words, with room for these query rows and tiles."""

    rows: int
    tiles: int
    start: int  # first word

    @property
    def end(self) -> int:
        return self._tiles_start + aligned(self.tiles * TILE_FIELDS)

    @property
    def _tiles_start(self) -> int:
        return self.start + aligned(ROW_FIELDS * self.rows)

    def write(self, table: TileTable, words: Ints, tail: int) -> int:
        """Write a table that fits; its lists of variable length start at word `tail`.

        Unused room becomes tiles without rows, which do nothing in the kernel.

        Returns:
            The first word after the lists.
        """
        rows = self._rows(words)
        tiles = self._tiles(words)
        rows[:, : table.rows.shape[1]] = table.rows
        count = len(table.tiles)
        pool_words = len(table.pool_tiles)
        first = -(-(tail + pool_words) // MASKED_FIELDS)
        start = first * MASKED_FIELDS
        end = first * MASKED_FIELDS + table.masked.size
        words[start:end] = table.masked.reshape(-1)
        tiles[:count] = table.tiles
        tiles[:count, MASKED_START : MASKED_END + 1] += first
        tiles[count:] = 0
        if pool_words:
            words[tail : tail + pool_words] = table.pool_tiles
            tiles[:count, POOL_START : POOL_END + 1] += tail
        return end

    def on_device(self, words: Tensor, shape: TileShape, window: int | None) -> DeviceTiles:
        """Return the table in an array of words that is on a device."""
        rows = self._rows(words)
        tiles = self._tiles(words)
        masked = words[: len(words) // MASKED_FIELDS * MASKED_FIELDS].view(-1, MASKED_FIELDS)
        return DeviceTiles(shape, window, rows, tiles, pool_tiles=words, masked=masked)

    def _rows(self, words: WordsT) -> WordsT:
        words = words[self.start : self.start + ROW_FIELDS * self.rows]
        return words.reshape(ROW_FIELDS, self.rows)

    def _tiles(self, words: WordsT) -> WordsT:
        start = self._tiles_start
        size = self.tiles * TILE_FIELDS
        return words[start : start + size].reshape(self.tiles, TILE_FIELDS)


def aligned(words: int) -> int:
    return -(-words // ALIGNED) * ALIGNED


def word_slices(counts: Sequence[int], start: int) -> list[slice]:
    """Return slices of these lengths, one after the other, each aligned as kernels need it."""
    starts = [start]
    for count in counts:
        starts.append(starts[-1] + aligned(count))
    return [slice(at, at + count) for at, count in zip(starts, counts, strict=False)]


def list_words(tables: Sequence[TileTable]) -> int:
    """Return the most words that the tables' lists of variable length take."""
    return sum(t.pool_tiles.size + t.masked.size + MASKED_FIELDS for t in tables)


def upload(tables: Sequence[TileTable], device: torch.device) -> list[DeviceTiles]:
    """Copy all tables to the device at once, without waiting for it."""
    places = []
    end = 0
    for table in tables:
        places.append(TablePlace(table.rows.shape[1], len(table.tiles), end))
        end = places[-1].end
    words = np.zeros(end + list_words(tables), np.int32)
    for place, table in zip(places, tables, strict=True):
        end = place.write(table, words, end)
    host = torch.from_numpy(words)
    if device.type == "cuda":
        host = host.pin_memory()
    moved = host.to(device, non_blocking=True)
    return [
        place.on_device(moved, table.shape, table.window)
        for place, table in zip(places, tables, strict=True)
    ]
