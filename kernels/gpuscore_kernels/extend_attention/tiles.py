"""Tile tables of `extend_attention`: the keys that each tile of query rows reads.

A table is built once per batch on the host, from lengths alone, and shared by all layers with one
window. The keys of a row come from these sources, in this order: its request's cached prefix (pages
of a pool), its segment's ancestors from the root down and its own segment (rows of this batch). The
rows of a tile share their prefix and root. From each source a tile of query rows reads

- *full* tiles of keys: all its rows see all of these keys, so there is no mask;
- *masked* tiles of keys: they contain a prefix's end, the diagonal, a window's edge or the border
  to another segment. Ancestors below the root are short, and have only masked tiles. Segments that
  are neighbours in the batch share masked tiles.

Tiles of keys that no row sees are left out.

Steady tiles of keys start at the first key of their source (for an item, its first token), and a
row reads them in the order of positions: full tiles do not follow masked ones. So the tiles of a
row depend neither on the rest of the batch nor on which of its keys were cached. (A masked key does
not change a row's sums, bit for bit.)
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from gpuscore_kernels.extend_attention.parts import (
    FullRuns,
    QueryTiles,
    Runs,
    Segments,
    SourceKeys,
    joined,
)
from gpuscore_kernels.extend_attention.table import (
    MASKED_END,
    MASKED_FIELDS,
    MASKED_START,
    NUM_PACKED,
    NUM_ROOT,
    NUM_ROWS,
    POOL_END,
    POOL_START,
    ROOT_BASE,
    ROW_START,
    SAME,
    SEGMENT_BASE,
    SHARED,
    TILE_FIELDS,
    Ints,
    Layout,
    TileShape,
    TileTable,
    Wide,
    ancestors_from_root,
)


class TableBuilder:
    """Builds the tables of one batch, and holds the data that they share.

    Args:
        layout: the batch.
        shape: sizes of tiles.

    Raises:
        ValueError: a tile of keys would cross the end of a page.
    """

    def __init__(self, layout: Layout, shape: TileShape) -> None:
        if layout.page_size % shape.keys or shape.keys % shape.masked_keys:
            raise ValueError(f"{shape} does not fit pages of {layout.page_size} tokens")
        self.layout = layout
        self.shape = shape
        self.has_prefix = any(layout.prefix_lens.tolist())

    def tables(self, rows: Sequence[Ints | None], window: int | None = None) -> list[TileTable]:
        """Build one table for each entry of `rows`.

        Args:
            rows: each entry has the query rows of a table, [M] rows of the batch in any order;
                None = all rows.
            window: a row sees only keys at positions above its own minus `window`; None = all.
        """
        runs_of_tables = [self.segments.rows(choice) for choice in rows]
        all_runs = joined(runs_of_tables)
        tiles = np.zeros((0, TILE_FIELDS), np.int32)
        masked = np.zeros((0, MASKED_FIELDS), np.int32)
        if len(all_runs.packed):
            tiles, masked = _Tiling(self, all_runs, window).fill()
        negated_keys = self._negated_keys(tiles)
        tables = []
        row = 0
        for query_rows in runs_of_tables:
            start, stop = (
                tiles[:, ROW_START].searchsorted((row, row + len(query_rows.order))).tolist()
            )
            order = negated_keys[start:stop].argsort(kind="stable")
            part, entries = _from_first(tiles[start:stop], masked)
            pool_tiles = self.pool_tiles[0] if len(part) else self.pool_tiles[0][:0]
            row_fields = query_rows.table()
            part = part.take(order, axis=0)
            tables.append(TileTable(self.shape, window, row_fields, part, pool_tiles, entries))
            row += len(query_rows.order)
        return tables

    @cached_property
    def lineage(self) -> list[Wide]:
        return ancestors_from_root(self.layout.parent)

    @cached_property
    def segments(self) -> Segments:
        return Segments.of(self.layout, self._groups())

    def _negated_keys(self, tiles: Ints) -> Ints:
        """Return minus the number of keys that each query tile reads."""
        full = tiles[:, POOL_START] - tiles[:, POOL_END] - tiles[:, NUM_PACKED]
        masked = tiles[:, MASKED_START] - tiles[:, MASKED_END]
        return full * self.shape.keys + masked * self.shape.masked_keys

    def _groups(self) -> Wide:
        """Return each segment's group number. A tile has rows of one group, which share keys."""
        layout = self.layout
        root = self.lineage[0] if self.lineage else -1
        return layout.request_of.astype(np.int64) * (len(layout.parent) + 1) + root

    @cached_property
    def pool_tiles(self) -> tuple[Ints, Wide]:
        """First slots of all full tiles of prefixes, and the first tile's index of each request."""
        if not self.has_prefix:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        counts = self.layout.prefix_lens.astype(np.int64) // self.shape.keys
        starts = counts.cumsum() - counts
        request = np.arange(len(counts)).repeat(counts)
        tile = np.arange(len(request)) - starts[request]
        return self.slots(request, tile * self.shape.keys).astype(np.int32), starts

    def slots(self, request: Wide, position: Wide) -> Wide:
        """Return the slots of the keys at some positions of requests' prefixes."""
        size = self.layout.page_size
        pages = self.layout.page_table[request, position // size].astype(np.int64)
        return pages * size + position % size


def _from_first(tiles: Ints, masked: Ints) -> tuple[Ints, Ints]:
    """Return neighbouring tiles and their masked tiles of keys, with indices that start at 0."""
    if not len(tiles):
        return tiles, masked[:0]
    first = tiles[0, ROW_START]
    start = tiles[0, MASKED_START]
    end = tiles[-1, MASKED_END]
    if first or start:
        tiles[:, ROW_START] -= first
        tiles[:, MASKED_START : MASKED_END + 1] -= start
    return tiles, masked[start:end]


class _Tiling:
    """Finds the keys of the query tiles of some rows."""

    def __init__(self, batch: TableBuilder, query: Runs, window: int | None) -> None:
        self.batch = batch
        self.shape = batch.shape
        self.window = window
        self.query_tiles = QueryTiles.of(query, batch.shape.rows)
        self.every = np.arange(len(self.query_tiles.first))
        self.segment = query.segment[self.query_tiles.run]  # the segment of each piece
        # The row and position of the segment's first token, and the indices in the segment of the
        # piece's first and last row.
        self.row = batch.segments.row[self.segment]
        self.position = batch.segments.position[self.segment]
        self.first = query.packed[self.query_tiles.piece] - self.row
        self.last = query.packed[self.query_tiles.end - 1] - self.row

    def fill(self) -> tuple[Ints, Ints]:
        """Return the query tiles in the order of their rows, and the masked tiles of keys."""
        batch = self.batch
        query_tiles = self.query_tiles
        tiles = np.zeros((len(query_tiles.first), TILE_FIELDS), np.int32)
        tiles[:, ROW_START] = query_tiles.first
        tiles[:, NUM_ROWS] = query_tiles.num_rows
        run = FullRuns(len(tiles), self.shape, self._edges())
        if batch.has_prefix:
            self._add_prefix(run, tiles)
        if batch.lineage:
            self._add_root(run, tiles, batch.lineage[0][self.segment[query_tiles.first_piece]])
        for ancestors in batch.lineage[1:]:
            length, position, row = batch.segments.whole(ancestors[self.segment])
            run.add(SourceKeys(query_tiles.tile, length, None, position, segment=self.row, row=row))
        self._add_segment(run, tiles)
        return tiles, run.masked(tiles, self._slots if batch.has_prefix else None)

    def _add_prefix(self, run: FullRuns, tiles: Ints) -> None:
        request = self._request
        length = self.batch.layout.prefix_lens[request].astype(np.int64)
        begin, count = run.add(SourceKeys(self.every, length, length, 0, segment=SHARED, row=None))
        start = self.batch.pool_tiles[1][request] + begin
        tiles[:, POOL_START] = start
        tiles[:, POOL_END] = start + count

    @cached_property
    def _request(self) -> Ints:
        """The request of each tile."""
        return self.batch.layout.request_of[self.segment[self.query_tiles.first_piece]]

    def _slots(self, tile: Wide, key: Wide) -> Wide:
        return self.batch.slots(self._request[tile].astype(np.int64), key)

    def _add_root(self, run: FullRuns, tiles: Ints, root: Wide) -> None:
        length, position, row = self.batch.segments.whole(root)
        begin, count = run.add(
            SourceKeys(self.every, length, length, position, segment=SHARED, row=row)
        )
        tiles[:, NUM_ROOT] = count
        tiles[:, ROOT_BASE] = row + begin * self.shape.keys

    def _add_segment(self, run: FullRuns, tiles: Ints) -> None:
        # A tile reads full tiles of its own segment only if it has a single piece.
        full = (self.first + 1) * self.query_tiles.alone
        tile = self.query_tiles.tile
        length = self.last + 1
        begin, count = run.add(
            SourceKeys(tile, length, full, self.position, segment=SAME, row=self.row)
        )
        last = self.query_tiles.last_piece
        root = tiles[:, NUM_ROOT]
        tiles[:, NUM_PACKED] = root + count[last]
        start = self.row + begin * self.shape.keys
        tiles[:, SEGMENT_BASE] = start[last] - root * self.shape.keys

    def _edges(self) -> tuple[Wide, Wide] | None:
        """Return for each tile the first position that any row sees, and that all rows see."""
        if self.window is None:
            return None
        start = self.position + 1 - self.window
        tiles = self.query_tiles.first_piece
        seen_by_any = np.minimum.reduceat(start + self.first, tiles)
        seen_by_all = np.maximum.reduceat(start + self.last, tiles)
        return seen_by_any, seen_by_all
