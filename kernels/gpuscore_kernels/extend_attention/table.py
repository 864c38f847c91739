"""Tile tables on a device: several in one array of int32 words, so that one copy is enough."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gpuscore_kernels.extend_attention.layout import (
    MASKED_END,
    MASKED_FIELDS,
    MASKED_START,
    POOL_END,
    POOL_START,
    ROW_FIELDS,
    TILE_FIELDS,
    Ints,
    TileShape,
    TileTable,
)

WordsT = TypeVar("WordsT", Ints, Tensor)

ALIGNED = 16  # words; Triton compiles a second kernel for pointers that are not 16 bytes aligned


@dataclass(frozen=True, slots=True)
class DeviceTiles:
    """The arrays of a `TileTable`, int32.

    `pool_tiles` and `masked` may be arrays that hold more than this table's entries; the tiles hold
    the ranges that belong to it.
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
        """Write a table that fits, with its lists of any length from word `tail` on.

        Unused room becomes tiles without rows, which do nothing in the kernel.

        Returns:
            The first word after the lists.
        """
        rows, tiles = self._rows(words), self._tiles(words)
        rows[:, : table.rows.shape[1]] = table.rows
        count, pool_words = len(table.tiles), len(table.pool_tiles)
        first = -(-(tail + pool_words) // MASKED_FIELDS)
        start, end = first * MASKED_FIELDS, first * MASKED_FIELDS + table.masked.size
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
        rows, tiles = self._rows(words), self._tiles(words)
        masked = words[: len(words) // MASKED_FIELDS * MASKED_FIELDS].view(-1, MASKED_FIELDS)
        return DeviceTiles(shape, window, rows, tiles, words, masked)

    def _rows(self, words: WordsT) -> WordsT:
        words = words[self.start : self.start + ROW_FIELDS * self.rows]
        return words.reshape(ROW_FIELDS, self.rows)

    def _tiles(self, words: WordsT) -> WordsT:
        start, size = self._tiles_start, self.tiles * TILE_FIELDS
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
    """The most words that the tables' lists of any length take."""
    return sum(t.pool_tiles.size + t.masked.size + MASKED_FIELDS for t in tables)


def upload(tables: Sequence[TileTable], device: torch.device) -> list[DeviceTiles]:
    """Copy all tables to the device at once, without waiting for it."""
    places, end = [], 0
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
