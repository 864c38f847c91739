"""The parts of a tile table: query rows in the order of their tiles, and the keys of each tile,
divided into full and masked tiles of keys.

Rows of one segment stand together, so most is computed from these *runs* and not from rows. Named
tuples take a tenth of the time of frozen dataclasses to make.

A small batch waits for its tables, and each call of NumPy takes about a microsecond, however small
its arrays are. So masked tiles are kept as ranges of keys, and all entries are made at the end.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from gpuscore_kernels.extend_attention.table import (
    BATCH_ROW,
    FIRST_ROW,
    IS_PACKED,
    KEY_POSITION,
    KEY_START,
    MASKED_AFTER,
    MASKED_END,
    MASKED_FIELDS,
    MASKED_START,
    NUM_KEYS,
    POSITION,
    QUERY_ROW,
    ROW_FIELDS,
    SAME,
    SEGMENT,
    Flags,
    Ints,
    Layout,
    TileShape,
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

    order: Wide  # [M] index of each row in the order in which they were given
    position: Ints  # [M]
    runs: Runs
    first: Wide  # [K] first row of each run's segment

    def table(self) -> Ints:
        """Return the rows as the kernel reads them, [ROW_FIELDS, M]."""
        table = np.empty((ROW_FIELDS, len(self.order)), np.int32)
        start = self.runs.start
        table[QUERY_ROW] = self.order
        table[BATCH_ROW] = self.runs.packed
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
    # Of each segment, and at index -1 of no segment: first row, this row's position, and length.
    row: Wide  # [S + 1]
    position: Wide  # [S + 1]
    length: Wide  # [S + 1]

    @classmethod
    def of(cls, layout: Layout, group: Wide) -> Self:
        start = layout.cu_seqlens.astype(np.int64)
        row = start.copy()
        length = np.zeros_like(start)
        row[-1] = 0
        np.subtract(start[1:], start[:-1], out=length[:-1])
        if len(layout.positions):
            # A segment without rows may begin behind the last row.
            position = layout.positions.take(row, mode="clip").astype(np.int64)
        else:
            position = length
        return cls(start, layout.positions, group, row, position=position, length=length)

    def whole(self, segment: Wide) -> tuple[Wide, Wide, Wide]:
        """Return length, position and first row of segments; segment -1 is empty."""
        return self.length[segment], self.position[segment], self.row[segment]

    def rows(self, chosen: Ints | None) -> QueryRows:
        """Return rows of the batch, which are given in any order; None = all."""
        return self._all() if chosen is None else self._some(chosen)

    def _all(self) -> QueryRows:
        packed = np.arange(len(self.positions))
        positions = self.positions
        segment = self.length.nonzero()[0]
        group = self.group[segment]
        if not (in_order := not np.count_nonzero(group[1:] < group[:-1])):
            order = group.argsort(kind="stable")
            segment = segment[order]
            group = group[order]
        counts = self.length[segment]
        start = np.zeros(len(counts) + 1, np.int64)
        counts.cumsum(out=start[1:])
        if not in_order:
            packed += (self.row[segment] - start[:-1]).repeat(counts)
            positions = positions[packed]
        runs = Runs(packed, segment, group, start)
        return QueryRows(packed, positions, runs, self.row[segment])

    def _some(self, rows: Ints) -> QueryRows:
        packed = rows.astype(np.int64)
        order = np.arange(len(rows))
        segment = self.start.searchsorted(packed, "right") - 1
        place = self.group[segment] * len(self.positions) + packed
        if np.count_nonzero(place[1:] < place[:-1]):
            order = place.argsort(kind="stable")
            packed = packed[order]
            segment = segment[order]
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
    piece: Wide  # [p] first row of each piece
    end: Wide  # [p] the row after the last of each piece
    tile: Wide  # [p]
    run: Wide  # [p]
    alone: Flags  # [p] True if the tile has no other piece

    @classmethod
    def of(cls, rows: Runs, size: int) -> Self:
        """Divide rows, at least one, into tiles of `size` rows.

        Segments that fill a tile share their tiles with no other.
        """
        first = _tiles(rows, size)
        bounds = rows.start
        piece = np.concatenate((bounds[:-1], first))
        piece.sort()
        piece = piece[_bounds(piece[1:] != piece[:-1], len(piece))[:-1]]
        first_piece = piece.searchsorted(first)
        ends = _ends(first, bounds[-1])
        last_pieces = _ends(first_piece, len(piece))
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
    bounds = rows.start
    group = rows.group
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
    bounds[0] = 0
    bounds[-1] = count
    np.add(places, 1, out=bounds[1:-1])
    return bounds


def _ends(starts: Wide, end: int) -> Wide:
    """Return the ends of consecutive parts; the last part ends at `end`."""
    ends = np.empty_like(starts)
    ends[:-1] = starts[1:]
    ends[-1] = end
    return ends


Slots: TypeAlias = Callable[[Wide, Wide], Wide]  # of (query tile, key of its prefix)

# Columns of ranges after the columns of masked tiles: query tile; 1 = before the run of full tiles.
TILE = MASKED_FIELDS
BEFORE = MASKED_FIELDS + 1
RANGE_FIELDS = MASKED_FIELDS + 2


class SourceKeys(NamedTuple):
    """Keys of one source, by carrier: a query tile, or a piece (rows of one segment in a tile).

    Carriers are in the order of tiles.
    """

    tile: Wide  # of each carrier
    length: Wide  # the most keys that a row of the carrier sees
    full: Wide | None  # number of first keys that come before every row of the tile; None = 0
    position: Wide | int  # of key 0
    segment: Wide | int  # as the column of masked tiles
    row: Wide | None  # of key 0 in the batch; None = the keys are in the pool


class FullRuns:
    """Divides the keys of one source after the other into full and masked tiles.

    The kernel reads masked tiles, then full tiles, then masked tiles again. Masked tiles before the
    full tiles exist with a window only. If tiles are steady, keys come in the order of positions:
    full tiles that would follow a masked tile become masked tiles.
    """

    def __init__(self, count: int, shape: TileShape, edges: tuple[Wide, Wide] | None) -> None:
        """Start with `count` query tiles that have no keys yet.

        edges: with a window, the first position that any row of each tile sees, and the first that
            all see; [count].
        """
        self.count = count
        self.shape = shape
        self.edges = edges
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
        size = self.shape.keys
        masked_keys = self.shape.masked_keys
        t = keys.tile
        seen = lowest[t] - keys.position
        all_see = highest[t] - keys.position
        low = np.clip(seen // size, 0, end)
        begin = np.clip(-(-all_see // size), low, end)
        stop = np.clip(full, begin, end)
        self._close(t[(begin > low) & self.started[t]])
        runs = (stop > begin) & ~self.closed[t]
        begin = np.where(runs, begin, end)
        stop = np.where(runs, stop, end)
        edge = np.maximum(seen, 0) // masked_keys * masked_keys
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
        entries = np.empty((len(first), RANGE_FIELDS), np.int64)
        entries[:, KEY_START] = first if keys.row is None else first + keys.row
        entries[:, NUM_KEYS] = count
        entries[:, KEY_POSITION] = first + keys.position
        entries[:, SEGMENT] = keys.segment
        entries[:, IS_PACKED] = keys.row is not None
        entries[:, TILE] = keys.tile
        entries[:, BEFORE] = before
        if isinstance(keys.segment, int) and keys.segment == SAME:
            entries[:, KEY_POSITION] = entries[:, KEY_START]
            entries = entries if self.shape.is_steady else _joined(entries)
        self.ranges.append(entries)

    def masked(self, tiles: Ints, slots: Slots | None) -> Ints:
        """Return all masked tiles by query tile; set the columns of `tiles` that point at them.

        slots: tells where a prefix's keys are; None = there are none in the pool.
        """
        masked_keys = self.shape.masked_keys
        ranges = self.ranges[0]
        if len(self.ranges) > 1:
            ranges = np.concatenate(self.ranges)
            ranges = ranges[ranges[:, TILE].argsort(kind="stable")]
        counts = (ranges[:, NUM_KEYS] + (masked_keys - 1)) // masked_keys
        masked = ranges.repeat(counts, axis=0)
        key = (np.arange(len(masked)) - (counts.cumsum() - counts).repeat(counts)) * masked_keys
        masked[:, KEY_START] += key
        masked[:, KEY_POSITION] += key
        masked[:, NUM_KEYS] -= key
        np.minimum(masked[:, NUM_KEYS], masked_keys, out=masked[:, NUM_KEYS])
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
