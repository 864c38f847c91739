"""Sorting of rows on disk, with bounded memory (external merge sort; Knuth, volume 3, 5.4), and
grouping of sorted rows into requests."""

import os
import struct
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain, count, pairwise
from pathlib import Path
from zlib import crc32

from gpuscore.commands.bulk.rows import TextRow
from gpuscore.errors import ConfigError

MEMORY = 64 * 2**20  # bytes of rows that are sorted in memory
ROW_OVERHEAD = 256  # bytes that Python takes for a row beside its texts
FAN_IN = 64  # sorted files that are read at a time
BUFFER = 128 * 2**10  # bytes of a sorted file that are read at a time
# Number, bytes of the first text, bytes of the rest; then a checksum of these and the texts.
_HEAD, _CHECK = struct.Struct("<QII"), struct.Struct("<I")
GROUP_ROWS, GROUP_BYTES = 2048, 2**20  # most rows and bytes of text of one request
# Bytes, a few pages of tokens: neighbours go into separate requests if prompts on one side begin
# alike for that much longer, so that each request's prompts share all of it.
WORTHWHILE = 256
_END = TextRow(b"", b"", -1)


class RowSorter:
    """A sorter of rows, which spills sorted files into a folder.

    Args:
        memory: bytes of rows to hold.
    """

    def __init__(self, folder: Path, memory: int = MEMORY) -> None:
        self._folder, self._memory = folder, memory
        self._rows: list[TextRow] = []
        self._size = 0
        self._files: list[Path] = []
        self._names = count()
        folder.mkdir()

    def add(self, row: TextRow) -> None:
        self._rows.append(row)
        self._size += len(row.first) + len(row.rest) + ROW_OVERHEAD
        if self._size > self._memory:
            self._spill()

    def finish(self) -> list[Path]:
        """Return at most FAN_IN sorted files that hold all rows; `merged` reads them."""
        if self._rows:
            self._spill()
        while len(self._files) > FAN_IN:
            some, self._files = self._files[:FAN_IN], self._files[FAN_IN:]
            self._write(merged(some))
            for path in some:
                path.unlink()
        return self._files

    def _spill(self) -> None:
        self._rows.sort()
        self._write(self._rows)
        self._rows, self._size = [], 0

    def _write(self, rows: Iterable[TextRow]) -> None:
        path = self._folder / f"{next(self._names)}.rows"
        with path.open("wb", buffering=BUFFER) as file:
            for first, rest, number in rows:
                row = _HEAD.pack(number, len(first), len(rest)) + first + rest
                file.write(row + _CHECK.pack(crc32(row)))
        self._files.append(path)


def merged(paths: Iterable[Path]) -> Iterator[TextRow]:
    """Yield the rows of sorted files in order; raise ConfigError for a damaged file."""
    return merge(*map(_read, paths))


def _read(path: Path) -> Iterator[TextRow]:
    with path.open("rb", buffering=BUFFER) as file:
        left = os.fstat(file.fileno()).st_size
        while left:
            head = file.read(_HEAD.size)
            number, first, rest = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, left, 0)
            left -= _HEAD.size + first + rest + _CHECK.size
            texts = b"" if left < 0 else file.read(first + rest)  # takes memory for so many bytes
            if left < 0 or file.read(_CHECK.size) != _CHECK.pack(crc32(texts, crc32(head))):
                raise ConfigError(f"{path} is damaged: remove {path.parents[1]} to begin anew")
            yield TextRow(texts[:first], texts[first:], number)


def grouped(
    rows: Iterable[TextRow],
    most_rows: int = GROUP_ROWS,
    free_cut: bool = True,
    cached: bool = True,
) -> Iterator[list[TextRow]]:
    """Yield neighbouring rows whose prompts go into one request: those of one first text, or, to
    save requests, rows of which each has a first text of its own.

    Args:
        rows: in order.
        most_rows: of one group.
        free_cut: a request's prompts share all that they begin with, not only what their first text
            alone determines; then rows of several first texts may be put together.
        cached: what prompts share is kept for the next requests, so neighbours may be separated.
    """
    group: list[TextRow] = []
    size = before = here = 0  # bytes shared with the row before, for the last row and for this one
    last, singles = _END, False  # the row before, and whether the group's first texts differ
    for row, following in pairwise(chain(rows, [_END])):
        after = _shared(row, following) if free_cut and cached else 0
        single = free_cut and row.first not in (last.first, following.first)
        length = len(row.rest) + (len(row.first) if single else 0)
        if group:
            fits = row.first == last.first or (single and singles)
            full = len(group) == most_rows or size + length > GROUP_BYTES
            if not fits or full or here + WORTHWHILE <= max(before, after):
                yield group
                group, size = [], 0
        group.append(row)
        singles, size = single, size + length
        last, before, here = row, here, after
    if group:
        yield group


def _shared(one: TextRow, two: TextRow) -> int:
    """Return the bytes with which two prompts begin alike; few count as none."""
    if two is _END:
        return 0
    if one.first != two.first:
        return _alike(one.first, two.first)
    return len(one.first) + _alike(one.rest, two.rest)


def _alike(a: bytes, b: bytes) -> int:
    if a[:WORTHWHILE] != b[:WORTHWHILE]:
        return 0
    least, most = 0, min(len(a), len(b)) + 1  # alike up to `least`, not up to `most`
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if a[:middle] == b[:middle] else (least, middle)
    return least
