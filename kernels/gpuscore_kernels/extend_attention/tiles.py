"""Tile tables of `extend_attention`: the keys that each tile of query rows reads.

A table is built once per batch on the host, from lengths alone, and shared by all layers with one
window. The keys of a row come from these sources, in this order: its request's cached prefix (pages
of a pool), its segment's ancestors from the root down and its own segment (rows of this batch). The
rows of a tile share their prefix and root. From each source a tile of query rows reads

- *full* tiles of keys, which all its rows see completely: no mask;
- *masked* tiles of keys, cut off by a prefix's end, the diagonal, a window's edge or the border to
  another segment. Ancestors below the root, which are short, have masked tiles only.

Tiles of keys that no row sees are left out.

Tiles of keys start at the first key of their source (for an item, its own first token), and a row
reads them in the order of positions. So if masked tiles are as wide as full ones, the tiles of a
row depend neither on the rest of the batch nor on which of its keys were cached. (A masked key
leaves a row's sums as they are, bit for bit.)
"""

import numpy as np

from gpuscore_kernels.extend_attention.key_tiles import FullRuns, SourceKeys, Wide
from gpuscore_kernels.extend_attention.layout import (
    MASKED_END,
    MASKED_FIELDS,
    MASKED_START,
    NUM_PACKED,
    NUM_ROOT,
    NUM_ROWS,
    OWN_BASE,
    POOL_END,
    POOL_START,
    ROOT_BASE,
    ROW_START,
    SHARED,
    TILE_FIELDS,
    Ints,
    Layout,
    TileShape,
    TileTable,
    ancestors_from_root,
)


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
        shared: False leaves out prefix and ancestors, the keys that rows share.

    Raises:
        ValueError: a tile of keys would not lie within one page.
    """
    if layout.page_size % shape.keys or shape.keys % shape.own:
        raise ValueError(f"{shape} does not fit pages of {layout.page_size} tokens")
    packed = np.arange(len(layout.positions)) if rows is None else rows.astype(np.int64)
    tiling = _Tiling(layout, shape, packed, window, shared)
    return tiling.table()


class _Tiling:
    def __init__(
        self, layout: Layout, shape: TileShape, packed: Wide, window: int | None, shared: bool
    ) -> None:
        self.layout, self.shape, self.window, self.shared = layout, shape, window, shared
        starts = layout.cu_seqlens.astype(np.int64)
        segment_of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))[packed]
        group_of = np.zeros(len(starts) - 1, np.int64)
        self.lineage = ancestors_from_root(layout.parent) if shared else []
        if shared:  # rows of a tile share their prefix and root
            root = self.lineage[0] if self.lineage else layout.parent
            group_of = layout.request_of.astype(np.int64) * len(starts) + root + 1
        self.order = np.lexsort((packed, group_of[segment_of]))
        self.segment = segment_of[self.order]
        self.position = layout.positions[packed[self.order]].astype(np.int64)
        self.offset = packed[self.order] - starts[self.segment]  # of each row in its segment
        self._cut(group_of[self.segment])

    def _cut(self, group: Wide) -> None:
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

    def _work(self, tiles: Wide) -> Wide:
        full = tiles[:, POOL_END] - tiles[:, POOL_START] + tiles[:, NUM_PACKED]
        masked = tiles[:, MASKED_END] - tiles[:, MASKED_START]
        return full * self.shape.keys + masked * self.shape.own

    def _pool_tiles(self) -> tuple[Wide, Wide]:
        """First slots of all full tiles of all prefixes, and the first entry of each request."""
        lengths = self.layout.prefix_lens.astype(np.int64)
        counts = lengths // self.shape.keys if self.shared else np.zeros_like(lengths)
        starts = np.cumsum(counts) - counts
        request = np.repeat(np.arange(len(counts)), counts)
        tile = np.arange(counts.sum()) - starts[request]
        return self._slots(request, tile * self.shape.keys), starts

    def _slots(self, request: Wide, position: Wide) -> Wide:
        size = self.layout.page_size
        pages = self.layout.page_table[request, position // size].astype(np.int64)
        return pages * size + position % size

    def _fill(self, tiles: Wide, pool_start: Wide) -> Wide:
        """Set all columns of `tiles` that are about keys; return the masked tiles."""
        layout, keys = self.layout, self.shape.keys
        run = FullRuns(tiles, self.shape, self.window, self._edges())
        segment = self.segment[self.first]
        request = layout.request_of[segment].astype(np.int64)
        # Sources that a batch does not have are skipped, which matters for small batches.
        if self.shared and layout.prefix_lens.any():
            begin, end = run.add(self._prefix(request), lambda t, at: self._slots(request[t], at))
            tiles[:, POOL_START] = pool_start[request] + begin
            tiles[:, POOL_END] = pool_start[request] + end
        if self.lineage:
            root = self.lineage[0][segment]
            rows = layout.cu_seqlens[np.maximum(root, 0)].astype(np.int64)
            begin, end = run.add(self._root(root), lambda t, at: rows[t] + at, packed=True)
            tiles[:, NUM_ROOT] = end - begin
            tiles[:, ROOT_BASE] = rows + begin * keys
        for ancestors in self.lineage[1:]:
            self._add_ancestors(run, ancestors[self.segment[self.piece]])
        own_rows = layout.cu_seqlens[self.segment[self.piece]].astype(np.int64)
        begin, end = run.add(self._own(), lambda c, at: own_rows[c] + at, packed=True)
        # Only the single piece of a tile has full tiles; for other pieces begin equals end.
        last = np.flatnonzero(np.diff(self.tile_of_piece, append=self.num_tiles))
        begin, end = begin[last], end[last]
        tiles[:, NUM_PACKED] = tiles[:, NUM_ROOT] + end - begin
        tiles[:, OWN_BASE] = own_rows[last] + (begin - tiles[:, NUM_ROOT]) * keys
        return run.masked()

    def _prefix(self, request: Wide) -> SourceKeys:
        length = self.layout.prefix_lens[request].astype(np.int64)
        every = np.arange(self.num_tiles)
        return SourceKeys(every, length, length, every * 0, every * 0 + SHARED)

    def _root(self, root: Wide) -> SourceKeys:
        _, length, position = self._whole(root)
        every = np.arange(self.num_tiles)
        return SourceKeys(every, length, length, position, every * 0 + SHARED)

    def _add_ancestors(self, run: "FullRuns", ancestor: Wide) -> None:
        """Add the ancestors of all pieces at one level below the root."""
        rows, length, position = self._whole(ancestor)
        segment = self.segment[self.piece]
        keys = SourceKeys(self.tile_of_piece, length, length * 0, position, segment)
        run.add(keys, lambda c, at: rows[c] + at, packed=True)

    def _whole(self, segment: Wide) -> tuple[Wide, Wide, Wide]:
        """Return first row, length and position of segments; those of -1 are empty."""
        starts = self.layout.cu_seqlens.astype(np.int64)
        some = np.maximum(segment, 0)
        length = np.where(segment < 0, 0, starts[some + 1] - starts[some])
        first = np.minimum(starts[some], len(self.layout.positions) - 1)
        return starts[some], length, self.layout.positions[first].astype(np.int64)

    def _own(self) -> SourceKeys:
        pieces_of_tile = np.bincount(self.tile_of_piece)[self.tile_of_piece]
        last = np.append(self.piece[1:], len(self.order)) - 1
        return SourceKeys(
            tile=self.tile_of_piece,
            length=self.offset[last] + 1,
            full=np.where(pieces_of_tile == 1, self.offset[self.piece] + 1, 0),
            position=self.position[self.piece] - self.offset[self.piece],
            segment=self.segment[self.piece],
        )

    def _edges(self) -> tuple[Wide, Wide]:
        """Per tile: the first position that any row sees, and the first that all rows see."""
        if self.window is None:
            return np.zeros(self.num_tiles, np.int64), np.zeros(self.num_tiles, np.int64)
        low = np.minimum.reduceat(self.position, self.first) - self.window + 1
        high = np.maximum.reduceat(self.position, self.first) - self.window + 1
        return low, high
