"""The keys of a tile table's query tiles, divided into full and masked tiles of keys.

A call of NumPy takes about a microsecond however small the arrays are, and a small batch waits for
its tables. So masked tiles are kept as ranges of keys, from which all are made at the end.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from gpuscore_kernels.extend_attention.layout import (
    IS_PACKED,
    KEY,
    KEY_START,
    MASKED_AFTER,
    MASKED_END,
    MASKED_FIELDS,
    MASKED_START,
    NUM_KEYS,
    OWN,
    WHOSE,
    Flags,
    Ints,
    TileShape,
    Wide,
)

Slots: TypeAlias = Callable[[Wide, Wide], Wide]  # of (query tile, key of its prefix)

# Columns of ranges after the columns of masked tiles: query tile; 1 = before the run of full tiles.
TILE, BEFORE = MASKED_FIELDS, MASKED_FIELDS + 1
RANGE_FIELDS = MASKED_FIELDS + 2


class SourceKeys(NamedTuple):
    """Keys of one source, by carrier: a query tile, or a piece (rows of one segment in a tile).

    Carriers are in the order of tiles.
    """

    tile: Wide  # of each carrier
    length: Wide  # the most keys that a row of the carrier sees
    full: Wide | None  # number of first keys that come before every row of the tile; None = 0
    position: Wide | int  # of key 0
    whose: Wide | int  # as the column of masked tiles
    row: Wide | None  # of key 0 in the batch; None = the keys are in the pool


class FullRuns:
    """Divides the keys of one source after the other into full and masked tiles.

    The kernel reads masked tiles, then full tiles, then masked tiles again. Masked tiles before the
    full tiles exist with a window only. If tiles are steady, keys come in the order of positions:
    full tiles that would follow a masked tile become masked tiles.
    """

    def __init__(self, count: int, shape: TileShape, edges: tuple[Wide, Wide] | None) -> None:
        """Take the number of query tiles.

        edges: with a window, the first position that any row of each tile sees, and the first that
            all see; [count].
        """
        self.count, self.shape, self.edges = count, shape, edges
        self.started = np.zeros(count, np.bool_)
        self.closed = np.zeros(count, np.bool_)
        self.ranges: list[Wide] = []

    def add(self, keys: SourceKeys) -> tuple[Wide, Wide]:
        """Return the first full tile of each carrier, and the number of its full tiles."""
        size = self.shape.keys
        end = (keys.length + (size - 1)) // size
        full = np.zeros(len(end), np.int64) if keys.full is None else keys.full // size
        if self.edges is None:
            return self._add_without_window(keys, full, end)
        return self._add_with_window(keys, full, end, *self.edges)

    def _add_without_window(self, keys: SourceKeys, stop: Wide, end: Wide) -> tuple[Wide, Wide]:
        """Rows see the first keys, so full tiles come before masked tiles."""
        if self.ranges:
            stop[self.closed[keys.tile]] = 0
        first = stop * self.shape.keys
        self._mask(keys, first, keys.length - first, before=False)
        self._close(keys.tile[stop < end])
        return np.zeros(len(stop), np.int64), stop

    def _add_with_window(
        self, keys: SourceKeys, full: Wide, end: Wide, lowest: Wide, highest: Wide
    ) -> tuple[Wide, Wide]:
        size, own, t = self.shape.keys, self.shape.own, keys.tile
        seen, all_see = lowest[t] - keys.position, highest[t] - keys.position
        low = np.clip(seen // size, 0, end)
        begin = np.clip(-(-all_see // size), low, end)
        stop = np.clip(full, begin, end)
        self._close(t[(begin > low) & self.started[t]])
        runs = (stop > begin) & ~self.closed[t]
        begin, stop = np.where(runs, begin, end), np.where(runs, stop, end)
        edge = np.maximum(seen, 0) // own * own
        for start, behind, before in ((low, begin, ~self.started[t]), (stop, end, False)):
            first = np.maximum(start * size, edge)
            count = np.minimum(behind * size, keys.length) - first
            self._mask(keys, first, np.maximum(count, 0), before)
        self._close(t[~runs & (end > low) & self.started[t]])
        self._close(t[runs & (stop < end)])
        self.started[t[runs]] = True
        return begin, stop - begin

    def _close(self, tiles: Wide) -> None:
        """Let no full tiles follow in these query tiles."""
        if self.shape.is_steady:
            self.closed[tiles] = True

    def _mask(self, keys: SourceKeys, first: Wide, count: Wide, before: Flags | bool) -> None:
        """Add masked tiles for `count` keys of each carrier from key `first` on."""
        made = np.empty((len(first), RANGE_FIELDS), np.int64)
        made[:, KEY_START] = first if keys.row is None else first + keys.row
        made[:, NUM_KEYS] = count
        made[:, KEY] = first + keys.position
        made[:, WHOSE] = keys.whose
        made[:, IS_PACKED] = keys.row is not None
        made[:, TILE] = keys.tile
        made[:, BEFORE] = before
        if isinstance(keys.whose, int) and keys.whose == OWN:
            made[:, KEY] = made[:, KEY_START]
            made = made if self.shape.is_steady else _joined(made)
        self.ranges.append(made)

    def masked(self, tiles: Ints, slots: Slots | None) -> Ints:
        """Return all masked tiles by query tile; set the columns of `tiles` that point at them.

        slots: tells where a prefix's keys are; None = there are none in the pool.
        """
        own, ranges = self.shape.own, self.ranges[0]
        if len(self.ranges) > 1:
            ranges = np.concatenate(self.ranges)
            ranges = ranges[ranges[:, TILE].argsort(kind="stable")]
        counts = (ranges[:, NUM_KEYS] + (own - 1)) // own
        masked = ranges.repeat(counts, axis=0)
        key = (np.arange(len(masked)) - (counts.cumsum() - counts).repeat(counts)) * own
        masked[:, KEY_START] += key
        masked[:, KEY] += key
        masked[:, NUM_KEYS] -= key
        np.minimum(masked[:, NUM_KEYS], own, out=masked[:, NUM_KEYS])
        self._point(tiles, masked)
        if slots is not None:
            pool = (masked[:, IS_PACKED] == 0).nonzero()[0]
            masked[pool, KEY_START] = slots(masked[pool, TILE], masked[pool, KEY_START])
        return masked[:, :MASKED_FIELDS].astype(np.int32)

    def _point(self, tiles: Ints, masked: Wide) -> None:
        """Set the columns of `tiles` that point at masked tiles."""
        tile = masked[:, TILE]
        bounds = tile.searchsorted(np.arange(self.count + 1))
        tiles[:, MASKED_START] = tiles[:, MASKED_AFTER] = bounds[:-1]
        tiles[:, MASKED_END] = bounds[1:]
        if self.edges is not None:
            before = tile[(masked[:, BEFORE] != 0) & self.started[tile]]
            tiles[:, MASKED_AFTER] += np.bincount(before, minlength=self.count)


def _joined(ranges: Wide) -> Wide:
    """Join ranges of the batch's rows that follow each other in the same query tile.

    A row sees rows of its own segment only, wherever the borders between segments are.
    """
    ranges = ranges[ranges[:, NUM_KEYS] > 0]
    if len(ranges) < 2:
        return ranges
    end = ranges[:, KEY_START] + ranges[:, NUM_KEYS]
    fresh = np.ones(len(ranges), np.bool_)
    fresh[1:] = (ranges[1:, KEY_START] != end[:-1]) | (ranges[1:, TILE] != ranges[:-1, TILE])
    fresh[1:] |= ranges[1:, BEFORE] != ranges[:-1, BEFORE]
    first = fresh.nonzero()[0]
    joined = ranges[first]
    joined[:, NUM_KEYS] = np.add.reduceat(ranges[:, NUM_KEYS], first)
    return joined
