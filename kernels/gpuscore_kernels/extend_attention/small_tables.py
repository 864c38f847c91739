"""Tile tables of small batches, tile by tile in plain Python.

`tiles` finds all tiles at once, in some 200 calls of NumPy. Each takes about a microsecond however
few tiles there are, and the device waits for the tables. One prompt has a handful of tiles.
The tables are the same, number by number.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from gpuscore_kernels.extend_attention.layout import (
    BATCH_ROW,
    FIRST_ROW,
    MASKED_FIELDS,
    OWN,
    POSITION,
    QUERY_ROW,
    ROW_FIELDS,
    SHARED,
    TILE_FIELDS,
    Ints,
    Layout,
    TileShape,
    TileTable,
    Wide,
)

SMALL = 24  # segments, and tiles that their tokens fill, together; more are quicker by NumPy
FEW = 64  # chosen rows, which are looked at one by one

Run: TypeAlias = tuple[int, Sequence[int]]  # a segment, and places of query rows in it


def is_small(layout: Layout, shape: TileShape, choices: Sequence[Ints | None]) -> bool:
    """True if tables of these choices of rows are quicker to build here; None = all rows."""
    tokens = len(layout.positions)
    if not tokens or len(layout.parent) + tokens // shape.rows > SMALL:
        return False
    return all(rows is None or len(rows) <= FEW for rows in choices)


class Piece(NamedTuple):
    """Query rows of one segment in one tile."""

    segment: int
    first: int  # place of the first row in the segment
    last: int
    rows: int


class SmallBatch:
    """Builds the tables of one batch that have no window.

    Args:
        layout, shape: as for `build_tiles`.
        pool_tiles: first slots of all full tiles of all prefixes, and the first one's place of each
            request; None = there is no prefix.
    """

    def __init__(
        self, layout: Layout, shape: TileShape, pool_tiles: tuple[Ints, Wide] | None
    ) -> None:
        self.layout, self.shape = layout, shape
        self.starts: list[int] = layout.cu_seqlens.tolist()
        self.parent: list[int] = layout.parent.tolist()
        self.request: list[int] = layout.request_of.tolist()
        self.prefix_lens: list[int] = layout.prefix_lens.tolist()
        self.position: list[int] = layout.positions.take(
            layout.cu_seqlens[:-1], mode="clip"
        ).tolist()
        self.ancestors = [self._ancestors(segment) for segment in range(len(self.parent))]
        self.depth = max(map(len, self.ancestors))
        # Rows of a tile share these: prefix and root.
        roots = [above[0] if above else -1 for above in self.ancestors]
        self.groups = [*zip(self.request, roots, strict=True)]
        self.pool_tiles = np.zeros(0, np.int32) if pool_tiles is None else pool_tiles[0]
        self.pool_start = None if pool_tiles is None else pool_tiles[1].tolist()

    def _ancestors(self, segment: int) -> list[int]:
        """Return the ancestors whose keys a segment's rows see, from the root down."""
        found: list[int] = []
        while (segment := self.parent[segment]) >= 0:
            found.insert(0, segment)
        return found

    def table(self, rows: Ints | None) -> TileTable:
        """Build the table of these rows of the batch; None = all."""
        order, runs = self._all() if rows is None else self._some(rows.tolist())
        tiles: list[list[int]] = []
        work: list[int] = []
        masked: list[int] = []
        row = 0
        for pieces in self._tiles(runs):
            fields, reads = self._tile(pieces, row, masked)
            tiles.append(fields)
            work.append(reads)
            row += fields[1]
        by_work = sorted(range(len(tiles)), key=work.__getitem__, reverse=True)
        return TileTable(
            shape=self.shape,
            window=None,
            rows=self._rows(order, runs, row),
            tiles=_array([tiles[index] for index in by_work], TILE_FIELDS),
            pool_tiles=self.pool_tiles if tiles else self.pool_tiles[:0],
            masked=np.array(masked, np.int32).reshape(-1, MASKED_FIELDS),
        )

    # ---- query rows ----

    def _all(self) -> tuple[Sequence[int] | None, list[Run]]:
        """Return all rows of the batch in the order of tiles, None if that is theirs, and runs."""
        segments = [s for s in range(len(self.parent)) if self._length(s)]
        segments.sort(key=self.groups.__getitem__)
        runs: list[Run] = [(s, range(self._length(s))) for s in segments]
        if all(before < after for before, after in pairwise(segments)):
            return None, runs
        return [self.starts[s] + place for s, places in runs for place in places], runs

    def _some(self, rows: list[int]) -> tuple[Sequence[int], list[Run]]:
        """Return the places in `rows` in the order of tiles, and runs."""
        segment_of = [bisect_right(self.starts, row) - 1 for row in rows]
        groups = [self.groups[segment] for segment in segment_of]
        order = sorted(range(len(rows)), key=lambda index: (groups[index], rows[index]))
        runs: list[tuple[int, list[int]]] = []
        for index in order:
            segment = segment_of[index]
            if not runs or runs[-1][0] != segment:
                runs.append((segment, []))
            runs[-1][1].append(rows[index] - self.starts[segment])
        return order, [*runs]

    def _rows(self, order: Sequence[int] | None, runs: list[Run], count: int) -> Ints:
        """Return the query rows as the kernel reads them, [ROW_FIELDS, count]."""
        found = np.empty((ROW_FIELDS, count), np.int32)
        if order is None:
            found[QUERY_ROW] = found[BATCH_ROW] = np.arange(count)
            found[POSITION] = self.layout.positions
        else:
            packed = [self.starts[s] + place for s, places in runs for place in places]
            found[QUERY_ROW], found[BATCH_ROW] = order, packed
            found[POSITION] = self.layout.positions[packed]
        counts = [len(places) for _, places in runs]
        first = np.array([self.starts[s] for s, _ in runs], np.int32)
        found[FIRST_ROW] = first.repeat(counts)
        return found

    def _tiles(self, runs: list[Run]) -> Iterator[list[Piece]]:
        """Yield the pieces of each tile; segments that fill a tile share theirs with no other."""
        size, pieces, room = self.shape.rows, list[Piece](), 0
        before, filled = (-1, -1), False
        for segment, places in runs:
            group, fills = self.groups[segment], len(places) >= size
            if pieces and (group != before or fills or filled):
                yield pieces
                pieces = []
            before, filled, start = group, fills, 0
            while start < len(places):
                if not pieces:
                    room = size
                stop = min(start + room, len(places))
                pieces.append(Piece(segment, places[start], places[stop - 1], stop - start))
                room -= stop - start
                start = stop
                if not room:
                    yield pieces
                    pieces = []
        if pieces:
            yield pieces

    # ---- keys; the functions add masked tiles to a list, field after field ----

    def _tile(self, pieces: list[Piece], row: int, masked: list[int]) -> tuple[list[int], int]:
        """Return a tile's fields, and the number of keys that it reads."""
        keys, start, base = self.shape.keys, len(masked) // MASKED_FIELDS, 0
        pool, pool_end, closed = self._prefix(self.request[pieces[0].segment], masked)
        root = full = 0
        if self.depth and (above := self.ancestors[pieces[0].segment]):
            base, length = self.starts[above[0]], self._length(above[0])
            root = 0 if closed else length // keys
            self._mask(masked, above[0], root * keys, length, SHARED)
            closed = closed or self._closes(root * keys < length)
            for level in range(1, self.depth):
                closed = self._below_root(level, pieces, masked) or closed
        # Only the single piece of a tile has full tiles.
        full = (pieces[0].first + 1) // keys if len(pieces) == 1 and not closed else 0
        for start_row, stop_row in self._own_rows(pieces, full * keys):
            self._mask_rows(masked, start_row, stop_row)
        end, count = len(masked) // MASKED_FIELDS, sum([piece.rows for piece in pieces])
        own = self.starts[pieces[-1].segment] - root * keys
        work = (pool_end - pool + root + full) * keys + (end - start) * self.shape.own
        fields = [row, count, start, start, end, pool, pool_end, root + full, root, base, own]
        return fields, work

    def _prefix(self, request: int, masked: list[int]) -> tuple[int, int, bool]:
        """Return the range of full tiles, and whether masked ones follow."""
        if self.pool_start is None:
            return 0, 0, False
        length, own, page = self.prefix_lens[request], self.shape.own, self.layout.page_size
        full = length // self.shape.keys
        for key in range(full * self.shape.keys, length, own):
            slot = int(self.layout.page_table[request, key // page]) * page + key % page
            masked += (slot, min(own, length - key), key, SHARED, 0)
        start = self.pool_start[request]
        return start, start + full, self._closes(full * self.shape.keys < length)

    def _closes(self, masked: bool) -> bool:
        """Return whether no full tile may follow, given whether there are masked ones."""
        return masked and self.shape.is_steady

    def _own_rows(self, pieces: list[Piece], skipped: int) -> list[list[int]]:
        """Return ranges of rows that the pieces see of their segments, after the skipped ones."""
        found: list[list[int]] = []
        for piece in pieces:
            start = self.starts[piece.segment]
            if found and found[-1][1] == start and not self.shape.is_steady:
                found[-1][1] = start + piece.last + 1
            else:
                found.append([start + skipped, start + piece.last + 1])
        return found

    def _below_root(self, level: int, pieces: list[Piece], masked: list[int]) -> bool:
        """Add the pieces' ancestors of one level; return whether there are any."""
        found = False
        for piece in pieces:
            above = self.ancestors[piece.segment]
            if len(above) > level and (length := self._length(above[level])):
                self._mask(masked, above[level], 0, length, self.starts[piece.segment])
                found = True
        return self._closes(found)

    def _length(self, segment: int) -> int:
        return self.starts[segment + 1] - self.starts[segment]

    def _mask(self, masked: list[int], segment: int, first: int, length: int, whose: int) -> None:
        """Add masked tiles for the keys [first, length) of a segment."""
        row, position, own = self.starts[segment], self.position[segment], self.shape.own
        for key in range(first, length, own):
            masked += (row + key, min(own, length - key), position + key, whose, 1)

    def _mask_rows(self, masked: list[int], start: int, stop: int) -> None:
        """Add masked tiles for rows of the batch, of which a row sees its own segment's."""
        own = self.shape.own
        for row in range(start, stop, own):
            masked += (row, min(own, stop - row), row, OWN, 1)


def _array(rows: list[list[int]], fields: int) -> Ints:
    flat = [*chain.from_iterable(rows)]  # nested lists take NumPy three times as long
    return np.array(flat, np.int32).reshape(-1, fields)
