"""Tile tables of `extend_attention`: the keys that each tile of query rows reads.

A table is built once per batch on the host, from lengths alone, and shared by all layers with one
window. The keys of a row come from three sources, in this order: its request's cached prefix (pages
of a pool), its segment's parent and its own segment (rows of this batch). From each source a tile
of query rows reads

- *full* tiles of keys, which all its rows see completely: no mask;
- *masked* tiles of keys, cut off by a prefix's end, the diagonal, a window's edge or the border to
  another segment.

Tiles of keys that no row sees are left out.

Tiles of keys start at the first key of their source (for an item, its own first token), and a row
reads them in the order of positions. So if masked tiles are as wide as full ones, the tiles of a
row depend neither on the rest of the batch nor on which of its keys were cached. (A masked key
leaves a row's sums as they are, bit for bit.)
"""

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
    NUM_PACKED,
    NUM_PARENT,
    NUM_ROWS,
    OWN_BASE,
    PARENT_BASE,
    POOL_END,
    POOL_START,
    ROW_START,
    SHARED,
    TILE_FIELDS,
    Ints,
    Layout,
    TileShape,
    TileTable,
)

_Wide: TypeAlias = NDArray[np.int64]
_Flags: TypeAlias = NDArray[np.bool_]
_StartOf: TypeAlias = Callable[[_Wide, _Wide], _Wide]  # of (carrier, key)


def build_tiles(
    layout: Layout,
    shape: TileShape,
    *,
    rows: Ints | None = None,
    window: int | None = None,
    shared: bool = True,
) -> TileTable:
    """Build the table of a batch.

    Args:
        layout: the batch.
        shape: sizes of tiles.
        rows: [M] rows of the batch that are query rows, in any order; None = all.
        window: a row sees only keys at positions above its own minus this; None = all.
        shared: False leaves out prefix and parent, the keys that rows share.

    Raises:
        ValueError: a tile of keys would not lie within one page.
    """
    if layout.page_size % shape.keys or shape.keys % shape.own:
        raise ValueError(f"{shape} does not fit pages of {layout.page_size} tokens")
    packed = np.arange(len(layout.positions)) if rows is None else rows.astype(np.int64)
    tiling = _Tiling(layout, shape, packed, window, shared)
    return tiling.table()


@dataclass(frozen=True, slots=True)
class _Keys:
    """Keys of one source, by carrier: a query tile, or a piece (rows of one segment in a tile)."""

    tile: _Wide  # of each carrier
    length: _Wide  # the most keys that a row of the carrier sees
    full: _Wide  # number of first keys that come before every row of the tile
    position: _Wide  # of key 0
    segment: _Wide  # SHARED, or the segment whose rows see them


class _Tiling:
    def __init__(
        self, layout: Layout, shape: TileShape, packed: _Wide, window: int | None, shared: bool
    ) -> None:
        self.layout, self.shape, self.window, self.shared = layout, shape, window, shared
        starts = layout.cu_seqlens.astype(np.int64)
        segment_of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))[packed]
        group_of = np.zeros(len(starts) - 1, np.int64)
        if shared:  # rows of a tile share their prefix and parent
            group_of = layout.request_of.astype(np.int64) * len(starts) + layout.parent + 1
        self.order = np.lexsort((packed, group_of[segment_of]))
        self.segment = segment_of[self.order]
        self.position = layout.positions[packed[self.order]].astype(np.int64)
        self.offset = packed[self.order] - starts[self.segment]  # of each row in its segment
        self._cut(group_of[self.segment])

    def _cut(self, group: _Wide) -> None:
        """Divide rows into tiles; segments that fill a tile share their tiles with no other."""
        count = len(group)
        new_segment = np.diff(self.segment, prepend=-1) != 0
        length = np.bincount(np.cumsum(new_segment))[np.cumsum(new_segment)] if count else group
        alone = length >= self.shape.rows
        fresh = np.diff(group, prepend=-1) != 0
        fresh |= new_segment & (alone | np.concatenate(([False], alone[:-1]))[:count])
        index = np.arange(count)
        within = index - np.maximum.accumulate(np.where(fresh, index, 0))
        new_tile = within % self.shape.rows == 0
        self.first = np.flatnonzero(new_tile)  # row of each tile
        self.num_tiles = len(self.first)
        self.piece = np.flatnonzero(new_tile | new_segment)  # first row of each piece
        self.tile_of_piece = np.cumsum(new_tile)[self.piece] - 1

    def table(self) -> TileTable:
        tiles = np.zeros((self.num_tiles, TILE_FIELDS), np.int64)
        masked = np.zeros((0, MASKED_FIELDS), np.int64)
        pool_tiles = np.zeros(0, np.int64)
        if self.num_tiles:
            tiles[:, ROW_START] = self.first
            tiles[:, NUM_ROWS] = np.diff(self.first, append=len(self.order))
            pool_tiles, pool_start = self._pool_tiles()
            masked = self._fill(tiles, pool_start)
            tiles = tiles[np.argsort(-self._work(tiles), kind="stable")]
        return TileTable(
            shape=self.shape,
            window=self.window,
            own_only=not self.shared,
            rows=np.stack((self.order, self.position, self.segment)).astype(np.int32),
            tiles=tiles.astype(np.int32),
            pool_tiles=pool_tiles.astype(np.int32),
            masked=masked.astype(np.int32),
        )

    def _work(self, tiles: _Wide) -> _Wide:
        full = tiles[:, POOL_END] - tiles[:, POOL_START] + tiles[:, NUM_PACKED]
        masked = tiles[:, MASKED_END] - tiles[:, MASKED_START]
        return full * self.shape.keys + masked * self.shape.own

    def _pool_tiles(self) -> tuple[_Wide, _Wide]:
        """First slots of all full tiles of all prefixes, and the first entry of each request."""
        lengths = self.layout.prefix_lens.astype(np.int64)
        counts = lengths // self.shape.keys if self.shared else np.zeros_like(lengths)
        starts = np.cumsum(counts) - counts
        request = np.repeat(np.arange(len(counts)), counts)
        tile = np.arange(counts.sum()) - starts[request]
        return self._slots(request, tile * self.shape.keys), starts

    def _slots(self, request: _Wide, position: _Wide) -> _Wide:
        size = self.layout.page_size
        pages = self.layout.page_table[request, position // size].astype(np.int64)
        return pages * size + position % size

    def _fill(self, tiles: _Wide, pool_start: _Wide) -> _Wide:
        """Set all columns of `tiles` that are about keys; return the masked tiles."""
        layout, keys = self.layout, self.shape.keys
        run = _FullRuns(self, tiles)
        segment = self.segment[self.first]
        request = layout.request_of[segment].astype(np.int64)
        # Sources that a batch does not have are skipped, which matters for small batches.
        if self.shared and layout.prefix_lens.any():
            begin, end = run.add(self._prefix(request), lambda t, at: self._slots(request[t], at))
            tiles[:, POOL_START] = pool_start[request] + begin
            tiles[:, POOL_END] = pool_start[request] + end
        if self.shared and (layout.parent >= 0).any():
            parent = layout.parent[segment].astype(np.int64)
            rows = layout.cu_seqlens[np.maximum(parent, 0)].astype(np.int64)
            begin, end = run.add(self._parent(parent), lambda t, at: rows[t] + at, packed=True)
            tiles[:, NUM_PARENT] = end - begin
            tiles[:, PARENT_BASE] = rows + begin * keys
        own_rows = layout.cu_seqlens[self.segment[self.piece]].astype(np.int64)
        begin, end = run.add(self._own(), lambda c, at: own_rows[c] + at, packed=True)
        # Only the single piece of a tile has full tiles; for other pieces begin equals end.
        last = np.flatnonzero(np.diff(self.tile_of_piece, append=self.num_tiles))
        begin, end = begin[last], end[last]
        tiles[:, NUM_PACKED] = tiles[:, NUM_PARENT] + end - begin
        tiles[:, OWN_BASE] = own_rows[last] + (begin - tiles[:, NUM_PARENT]) * keys
        return run.masked()

    def _prefix(self, request: _Wide) -> _Keys:
        length = self.layout.prefix_lens[request].astype(np.int64)
        every = np.arange(self.num_tiles)
        return _Keys(every, length, length, every * 0, every * 0 + SHARED)

    def _parent(self, parent: _Wide) -> _Keys:
        starts = self.layout.cu_seqlens.astype(np.int64)
        some = np.maximum(parent, 0)
        length = np.where(parent < 0, 0, starts[some + 1] - starts[some])
        first = np.minimum(starts[some], len(self.layout.positions) - 1)
        every = np.arange(self.num_tiles)
        position = self.layout.positions[first].astype(np.int64)
        return _Keys(every, length, length, position, every * 0 + SHARED)

    def _own(self) -> _Keys:
        pieces_of_tile = np.bincount(self.tile_of_piece)[self.tile_of_piece]
        last = np.append(self.piece[1:], len(self.order)) - 1
        return _Keys(
            tile=self.tile_of_piece,
            length=self.offset[last] + 1,
            full=np.where(pieces_of_tile == 1, self.offset[self.piece] + 1, 0),
            position=self.position[self.piece] - self.offset[self.piece],
            segment=self.segment[self.piece],
        )

    def edges(self) -> tuple[_Wide, _Wide]:
        """Per tile: the first position that any row sees, and the first that all rows see."""
        if self.window is None:
            return np.zeros(self.num_tiles, np.int64), np.zeros(self.num_tiles, np.int64)
        low = np.minimum.reduceat(self.position, self.first) - self.window + 1
        high = np.maximum.reduceat(self.position, self.first) - self.window + 1
        return low, high


class _FullRuns:
    """Divides the keys of one source after the other into full and masked tiles.

    The kernel reads masked tiles, then full ones, then masked ones. So each query tile has one run
    of full tiles; further ones are masked. Masked tiles before the run exist with a window only.
    """

    def __init__(self, tiling: _Tiling, tiles: _Wide) -> None:
        self.tiling, self.tiles = tiling, tiles
        self.low, self.high = tiling.edges()
        self.started = np.zeros(tiling.num_tiles, np.bool_)
        self.closed = np.zeros(tiling.num_tiles, np.bool_)
        self.parts: list[tuple[_Wide, _Flags]] = []

    def add(self, keys: _Keys, start_of: _StartOf, packed: bool = False) -> tuple[_Wide, _Wide]:
        """Return each carrier's range of full tiles; `start_of(carrier, key)` gives slot or row."""
        size, t = self.tiling.shape.keys, keys.tile
        end = -(-keys.length // size)
        if self.tiling.window is None:
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
        self, keys: _Keys, start_of: _StartOf, packed: bool, end: _Wide
    ) -> tuple[_Wide, _Wide]:
        """Do the same as `add`; rows see the first keys, so full tiles come before masked ones."""
        t = keys.tile
        stop = np.where(self.closed[t], 0, np.minimum(keys.full // self.tiling.shape.keys, end))
        self._mask(keys, start_of, packed, stop, end, before=np.zeros(len(t), np.bool_))
        self.closed[t[stop < end]] = True
        return np.zeros_like(stop), stop

    def _mask(
        self,
        keys: _Keys,
        start_of: _StartOf,
        packed: bool,
        begin: _Wide,
        end: _Wide,
        before: _Flags,
    ) -> None:
        """Add masked tiles for the keys of tiles [begin, end), except keys that no row sees."""
        size, own = self.tiling.shape.keys, self.tiling.shape.own
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

    def masked(self) -> _Wide:
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
