"""Sorting of rows on disk, with bounded memory (external merge sort; Knuth, volume 3, 5.4)."""

import struct
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import count
from pathlib import Path

from gpuscore.bulk.rows import TextRow

MEMORY = 64 * 2**20  # bytes of rows that are sorted in memory
ROW_OVERHEAD = 256  # bytes that Python takes for a row beside its texts
FAN_IN = 64  # sorted files that are read at a time
BUFFER = 128 * 2**10  # bytes of a sorted file that are read at a time
_HEAD = struct.Struct("<QII")  # number, bytes of the first text, bytes of the rest


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
                file.write(_HEAD.pack(number, len(first), len(rest)))
                file.write(first)
                file.write(rest)
        self._files.append(path)


def merged(paths: Iterable[Path]) -> Iterator[TextRow]:
    """Yield the rows of sorted files in order."""
    return merge(*map(_read, paths))


def _read(path: Path) -> Iterator[TextRow]:
    with path.open("rb", buffering=BUFFER) as file:
        while head := file.read(_HEAD.size):
            number, first, rest = _HEAD.unpack(head)
            yield TextRow(file.read(first), file.read(rest), number)
