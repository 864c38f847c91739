"""Query rows in the order of their tiles, and their division into tiles and pieces.

Rows of one segment stand together, so most is computed from these *runs* and not from rows. Named
tuples take a tenth of the time of frozen dataclasses to make.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np

from gpuscore_kernels.extend_attention.layout import (
    BATCH_ROW,
    FIRST_ROW,
    POSITION,
    QUERY_ROW,
    ROW_FIELDS,
    Flags,
    Ints,
    Layout,
    Wide,
)


class Runs(NamedTuple):
    """Query rows in the order of tiles, as runs of rows of one segment each."""

    packed: Wide  # [M] rows of the batch
    segment: Wide  # [K]
    group: Wide  # [K] rows of two groups never share a tile
    start: Wide  # [K + 1] first row of each run, and M


class QueryRows(NamedTuple):
    """The query rows of one table."""

    order: Wide  # [M] places that the rows were given at
    position: Ints  # [M]
    runs: Runs
    first: Wide  # [K] first row of each run's segment

    def table(self) -> Ints:
        """Return the rows as the kernel reads them, [ROW_FIELDS, M]."""
        table, start = np.empty((ROW_FIELDS, len(self.order)), np.int32), self.runs.start
        table[QUERY_ROW], table[BATCH_ROW] = self.order, self.runs.packed
        table[FIRST_ROW] = self.first.repeat(start[1:] - start[:-1])
        table[POSITION] = self.position
        return table


def joined(tables: Sequence[QueryRows]) -> Runs:
    """Return the runs of several tables, one table after the other, which share no tile."""
    parts = [table.runs for table in tables]
    if len(parts) == 1:
        return parts[0]
    before = [0, *accumulate(len(part.packed) for part in parts)]
    starts = [part.start[:-1] + count for part, count in zip(parts, before, strict=False)]
    return Runs(
        np.concatenate([part.packed for part in parts]),
        np.concatenate([part.segment for part in parts]),
        np.concatenate([part.group * len(parts) + n for n, part in enumerate(parts)]),
        np.concatenate([*starts, before[-1:]]),
    )


class Segments(NamedTuple):
    """The segments of a batch."""

    start: Wide  # [S + 1]
    positions: Ints  # [T]
    group: Wide  # [S] groups come in this order
    # Of each segment, and at last for place -1, no segment: first row, its position, and length.
    row: Wide  # [S + 1]
    position: Wide  # [S + 1]
    length: Wide  # [S + 1]

    @classmethod
    def of(cls, layout: Layout, group: Wide) -> Self:
        start = layout.cu_seqlens.astype(np.int64)
        row, length = start.copy(), np.zeros_like(start)
        row[-1] = 0
        np.subtract(start[1:], start[:-1], out=length[:-1])
        if len(layout.positions):
            # A segment without rows may begin behind the last row.
            position = layout.positions.take(row, mode="clip").astype(np.int64)
        else:
            position = length
        return cls(start, layout.positions, group, row, position, length)

    def whole(self, segment: Wide) -> tuple[Wide, Wide, Wide]:
        """Return length, position and first row of segments; segment -1 is empty."""
        return self.length[segment], self.position[segment], self.row[segment]

    def rows(self, chosen: Ints | None) -> QueryRows:
        """Return rows of the batch, which are given in any order; None = all."""
        return self._all() if chosen is None else self._some(chosen)

    def _all(self) -> QueryRows:
        packed, positions = np.arange(len(self.positions)), self.positions
        segment = self.length.nonzero()[0]
        group = self.group[segment]
        if not (in_order := not np.count_nonzero(group[1:] < group[:-1])):
            order = group.argsort(kind="stable")
            segment, group = segment[order], group[order]
        counts = self.length[segment]
        start = np.zeros(len(counts) + 1, np.int64)
        counts.cumsum(out=start[1:])
        if not in_order:
            packed += (self.row[segment] - start[:-1]).repeat(counts)
            positions = positions[packed]
        runs = Runs(packed, segment, group, start)
        return QueryRows(packed, positions, runs, self.row[segment])

    def _some(self, rows: Ints) -> QueryRows:
        packed, order = rows.astype(np.int64), np.arange(len(rows))
        segment = self.start.searchsorted(packed, "right") - 1
        place = self.group[segment] * len(self.positions) + packed
        if np.count_nonzero(place[1:] < place[:-1]):
            order = place.argsort(kind="stable")
            packed, segment = packed[order], segment[order]
        start = _bounds(segment[1:] != segment[:-1], len(packed))
        segment = segment[start[:-1]]
        runs = Runs(packed, segment, self.group[segment], start)
        return QueryRows(order, self.positions[packed], runs, self.row[segment])


class QueryTiles(NamedTuple):
    """Tiles of query rows, and their pieces: rows of one segment in a tile."""

    first: Wide  # [n] first row of each tile
    num_rows: Wide  # [n]
    first_piece: Wide  # [n]
    last_piece: Wide  # [n]
    piece: Wide  # [p] first row of each piece ...
    end: Wide  # ... and the row behind its last
    tile: Wide  # [p]
    run: Wide  # [p]
    alone: Flags  # [p] True if the tile has no other piece

    @classmethod
    def of(cls, rows: Runs, size: int) -> Self:
        """Divide rows, at least one, into tiles of `size` rows.

        Segments that fill a tile share their tiles with no other.
        """
        first, bounds = _tiles(rows, size), rows.start
        piece = np.concatenate((bounds[:-1], first))
        piece.sort()
        piece = piece[_bounds(piece[1:] != piece[:-1], len(piece))[:-1]]
        first_piece = piece.searchsorted(first)
        ends, last_pieces = _ends(first, bounds[-1]), _ends(first_piece, len(piece))
        tile = first.searchsorted(piece, "right") - 1
        return cls(
            first=first,
            num_rows=ends - first,
            first_piece=first_piece,
            last_piece=last_pieces - 1,
            piece=piece,
            end=_ends(piece, bounds[-1]),
            tile=tile,
            run=bounds.searchsorted(piece, "right") - 1,
            alone=(last_pieces - first_piece == 1)[tile],
        )


def _tiles(rows: Runs, size: int) -> Wide:
    """Return the first row of each tile."""
    bounds, group = rows.start, rows.group
    fills = bounds[1:] - bounds[:-1] >= size
    block = bounds[_bounds((group[1:] != group[:-1]) | fills[1:] | fills[:-1], len(group))]
    lengths = block[1:] - block[:-1]
    count = (lengths + (size - 1)) // size
    before = count.cumsum() - count
    within = np.arange(before[-1] + count[-1]) * size
    within += (block[:-1] - before * size).repeat(count)
    return within


def _bounds(fresh: Flags, count: int) -> Wide:
    """Return 0, all places p of `count` with fresh[p - 1], and `count`; 0 alone if that is 0."""
    if count == 0:
        return np.zeros(1, np.int64)
    places = fresh.nonzero()[0]
    bounds = np.empty(len(places) + 2, np.int64)
    bounds[0], bounds[-1] = 0, count
    np.add(places, 1, out=bounds[1:-1])
    return bounds


def _ends(starts: Wide, end: int) -> Wide:
    """Return the ends of consecutive parts; the last part ends at `end`."""
    ends = np.empty_like(starts)
    ends[:-1], ends[-1] = starts[1:], end
    return ends
