"""Tile tables of small batches, tile by tile in plain Python.

`tiles` finds all tiles at once, in some 200 calls of NumPy. Each takes about a microsecond however
few tiles there are, and the device waits for the tables. One prompt has a handful of tiles; without
a cached prefix its table follows from its length alone.
The tables are the same, number by number.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
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


Piece: TypeAlias = tuple[int, int, int, int]  # segment, places in it of first and last row; rows


class Shared(NamedTuple):
    """The keys that all tiles of a group read first: prefix and root; as columns of tiles."""

    pool: int
    pool_end: int
    num_root: int
    root_base: int
    closed: bool  # no full tile may follow
    masked: list[int]  # field after field


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
        self._shared: dict[tuple[int, int], Shared] = {}

    def _ancestors(self, segment: int) -> list[int]:
        """Return the ancestors whose keys a segment's rows see, from the root down."""
        ancestors: list[int] = []
        while (segment := self.parent[segment]) >= 0:
            ancestors.insert(0, segment)
        return ancestors

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
            tiles=_array([*chain(*[tiles[n] for n in by_work])], len(tiles), TILE_FIELDS),
            pool_tiles=self.pool_tiles if tiles else self.pool_tiles[:0],
            masked=_array(masked, -1, MASKED_FIELDS),
        )

    # ---- query rows ----

    def _all(self) -> tuple[Sequence[int] | None, list[Run]]:
        """Return all rows in the order of tiles (None if rows are in it already), and runs."""
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
        if order is None:
            table = np.empty((ROW_FIELDS, count), np.int32)
            table[QUERY_ROW] = table[BATCH_ROW] = np.arange(count)
            table[POSITION] = self.layout.positions
            for segment, _ in runs:
                start, stop = self.starts[segment : segment + 2]
                table[FIRST_ROW, start:stop] = start
            return table
        fields: list[list[int]] = [[] for _ in range(ROW_FIELDS)]
        fields[QUERY_ROW] += order
        for segment, places in runs:
            row, position = self.starts[segment], self.position[segment]
            fields[BATCH_ROW] += [row + place for place in places]
            fields[POSITION] += [position + place for place in places]
            fields[FIRST_ROW] += [row] * len(places)
        return _array([*chain(*fields)], ROW_FIELDS, count)

    def _tiles(self, runs: list[Run]) -> Iterator[list[Piece]]:
        """Yield the pieces of each tile; segments that fill a tile share no tile."""
        size, pieces, room = self.shape.rows, list[Piece](), 0
        before, filled = (-1, -1), False
        for segment, places in runs:
            group, count = self.groups[segment], len(places)
            fills = count >= size
            if pieces and (group != before or fills or filled):
                yield pieces
                pieces = []
            before, filled, start = group, fills, 0
            while start < count:
                if not pieces:
                    room = size
                stop = min(start + room, count)
                pieces.append((segment, places[start], places[stop - 1], stop - start))
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
        keys, own, start = self.shape.keys, self.shape.own, len(masked) // MASKED_FIELDS
        segment, first, last, count = pieces[-1]
        pool, pool_end, root, base, closed, shared = self._shared_keys(segment)
        masked += shared
        for level in range(1, self.depth):
            closed = self._below_root(level, pieces, masked) or closed
        own_base, full = self.starts[segment], 0
        if len(pieces) == 1:
            full = 0 if closed else (first + 1) // keys
            rows = [[own_base + full * keys, own_base + last + 1]]
        else:  # only the single piece of a tile has full tiles
            count, rows = sum([piece[3] for piece in pieces]), self._own_rows(pieces)
        for begin, stop in rows:
            for key in range(begin, stop, own):
                masked += (key, min(own, stop - key), key, OWN, 1)
        end, packed = len(masked) // MASKED_FIELDS, root + full
        fields = [row, count, start, start, end, pool, pool_end, packed, root, base]
        fields.append(own_base - root * keys)
        return fields, (pool_end - pool + packed) * keys + (end - start) * own

    def _shared_keys(self, segment: int) -> Shared:
        """Return the keys that a segment's group shares, which its first tile finds."""
        if (known := self._shared.get(self.groups[segment])) is not None:
            return known
        masked: list[int] = []
        root = base = 0
        pool, pool_end, closed = self._prefix(self.request[segment], masked)
        if above := self.ancestors[segment]:
            base, length = self.starts[above[0]], self._length(above[0])
            root = 0 if closed else length // self.shape.keys
            self._mask(masked, above[0], root * self.shape.keys, length, SHARED)
            closed = closed or self._closes(root * self.shape.keys < length)
        made = Shared(pool, pool_end, root, base, closed, masked)
        self._shared[self.groups[segment]] = made
        return made

    def _prefix(self, request: int, masked: list[int]) -> tuple[int, int, bool]:
        """Return the range of a prefix's full tiles, and `_closes` for its masked tiles."""
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
        """Return True if no full tile may follow; `masked`: the row has masked tiles so far."""
        return masked and self.shape.is_steady

    def _own_rows(self, pieces: list[Piece]) -> list[list[int]]:
        """Return ranges of rows that the pieces see of their segments."""
        ranges: list[list[int]] = []
        for segment, _, last, _ in pieces:
            start = self.starts[segment]
            if ranges and ranges[-1][1] == start and not self.shape.is_steady:
                ranges[-1][1] = start + last + 1
            else:
                ranges.append([start, start + last + 1])
        return ranges

    def _below_root(self, level: int, pieces: list[Piece], masked: list[int]) -> bool:
        """Add the pieces' ancestors of one level; return whether there are any."""
        has_keys = False
        for segment, *_ in pieces:
            above = self.ancestors[segment]
            if len(above) > level and (length := self._length(above[level])):
                self._mask(masked, above[level], 0, length, self.starts[segment])
                has_keys = True
        return self._closes(has_keys)

    def _length(self, segment: int) -> int:
        return self.starts[segment + 1] - self.starts[segment]

    def _mask(self, masked: list[int], segment: int, first: int, length: int, whose: int) -> None:
        """Add masked tiles for the keys [first, length) of a segment."""
        row, position, own = self.starts[segment], self.position[segment], self.shape.own
        for key in range(first, length, own):
            masked += (row + key, min(own, length - key), position + key, whose, 1)


@lru_cache(maxsize=1024)  # up to 12 KiB each: `is_small` bounds the tokens
def of_one_segment(count: int, shape: TileShape, rows: tuple[int, ...] | None) -> TileTable:
    """Return the table of a batch of one segment of `count` tokens without a prefix, read-only.

    Prompts of equal lengths share it.
    """
    zero = np.zeros(1, np.int32)
    bounds, pages = np.array([0, count], np.int32), np.zeros((1, 0), np.int32)
    layout = Layout(
        np.arange(count, dtype=np.int32), bounds, zero - 1, zero, zero, pages, shape.keys
    )
    table = SmallBatch(layout, shape, None).table(
        None if rows is None else np.array(rows, np.int32)
    )
    for array in (table.rows, table.tiles, table.pool_tiles, table.masked):
        array.flags.writeable = False
    return table


def _array(flat: list[int], *shape: int) -> Ints:
    packed = struct.pack(f"{len(flat)}i", *flat)  # np.array takes three times as long
    return np.frombuffer(bytearray(packed), np.int32).reshape(shape)
