"""The keys of a tile table's query tiles, divided into full and masked tiles of keys."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpuscore_kernels.extend_attention.layout import (
    MASKED_AFTER,
    MASKED_END,
    MASKED_FIELDS,
    MASKED_START,
    TileShape,
)

Wide: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]
StartOf: TypeAlias = Callable[[Wide, Wide], Wide]  # of (carrier, key)


@dataclass(frozen=True, slots=True)
class SourceKeys:
    """Keys of one source, by carrier: a query tile, or a piece (rows of one segment in a tile)."""

    tile: Wide  # of each carrier
    length: Wide  # the most keys that a row of the carrier sees
    full: Wide  # number of first keys that come before every row of the tile
    position: Wide  # of key 0
    segment: Wide  # SHARED, or the segment whose rows see them


class FullRuns:
    """Divides the keys of one source after the other into full and masked tiles.

    The kernel reads masked tiles, then full ones, then masked ones. So each query tile has one run
    of full tiles; further ones are masked. Masked tiles before the run exist with a window only.
    """

    def __init__(
        self, tiles: Wide, shape: TileShape, window: int | None, edges: tuple[Wide, Wide]
    ) -> None:
        """Take the query tiles [n, TILE_FIELDS], whose columns about masked tiles it sets.

        edges: the first position that any row of each tile sees, and the first that all see; [n].
        """
        self.tiles, self.shape, self.window = tiles, shape, window
        self.low, self.high = edges
        self.started = np.zeros(len(tiles), np.bool_)
        self.closed = np.zeros(len(tiles), np.bool_)
        self.parts: list[tuple[Wide, Flags]] = []

    def add(self, keys: SourceKeys, start_of: StartOf, packed: bool = False) -> tuple[Wide, Wide]:
        """Return each carrier's range of full tiles; `start_of(carrier, key)` gives slot or row."""
        size, t = self.shape.keys, keys.tile
        end = -(-keys.length // size)
        if self.window is None:
            return self._add_without_window(keys, start_of, packed, end)
        low = np.clip((self.low[t] - keys.position) // size, 0, end)
        begin = np.clip(-(-(self.high[t] - keys.position) // size), low, end)
        stop = np.clip(keys.full // size, begin, end)
        self.closed[t[begin > low]] |= self.started[t[begin > low]]
        runs = (stop > begin) & ~self.closed[t]
        begin, stop = np.where(runs, begin, end), np.where(runs, stop, end)
        self._mask(keys, start_of, packed, low, begin, before=~self.started[t])
        self._mask(keys, start_of, packed, stop, end, before=np.zeros_like(runs))
        unseen = ~runs & (end > low)
        self.closed[t[unseen]] |= self.started[t[unseen]]
        self.closed[t[runs & (stop < end)]] = True
        self.started[t[runs]] = True
        return begin, stop

    def _add_without_window(
        self, keys: SourceKeys, start_of: StartOf, packed: bool, end: Wide
    ) -> tuple[Wide, Wide]:
        """Do the same as `add`; rows see the first keys, so full tiles come before masked ones."""
        t = keys.tile
        stop = np.where(self.closed[t], 0, np.minimum(keys.full // self.shape.keys, end))
        self._mask(keys, start_of, packed, stop, end, before=np.zeros(len(t), np.bool_))
        self.closed[t[stop < end]] = True
        return np.zeros_like(stop), stop

    def _mask(
        self,
        keys: SourceKeys,
        start_of: StartOf,
        packed: bool,
        begin: Wide,
        end: Wide,
        before: Flags,
    ) -> None:
        """Add masked tiles for the keys of tiles [begin, end), except keys that no row sees."""
        size, own = self.shape.keys, self.shape.own
        low = np.maximum(self.low[keys.tile] - keys.position, 0)
        first = np.maximum(begin * size, low // own * own)
        last = np.minimum(end * size, keys.length)
        counts = np.maximum(-(-(last - first) // own), 0)
        carrier = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        key = first[carrier] + nth * own
        columns = [
            start_of(carrier, key),
            np.minimum(own, last[carrier] - key),
            keys.position[carrier] + key,
            keys.segment[carrier],
            np.full(len(key), packed),
            keys.tile[carrier],
        ]
        self.parts.append((np.stack(columns, axis=1), before[carrier]))

    def masked(self) -> Wide:
        """Return all masked tiles by query tile; set the columns of `tiles` that point at them."""
        parts = np.concatenate([part for part, _ in self.parts])
        tile = parts[:, MASKED_FIELDS]
        before = np.concatenate([flags for _, flags in self.parts]) & self.started[tile]
        count = np.bincount(tile, minlength=len(self.tiles))
        ends = np.cumsum(count)
        self.tiles[:, MASKED_START] = ends - count
        self.tiles[:, MASKED_AFTER] = ends - count + np.bincount(tile[before], minlength=len(count))
        self.tiles[:, MASKED_END] = ends
        return parts[np.argsort(tile, kind="stable"), :MASKED_FIELDS]
