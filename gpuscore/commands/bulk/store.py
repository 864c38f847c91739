"""Rows and results on disk: sorting of rows with bounded memory (external merge sort; Knuth, volume
3, 5.4), grouping of sorted rows into requests, and results by row number.

The result of each row has a place of fixed size: kind, scores or the position of a text, checksum.
A row is done exactly if its checksum is right, so a write that was cut off by a kill, or that never
reached the disk, counts as not done, and the row is computed again. A text (a reason or an answer)
is appended to a second file before the row that refers to it is written.
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import chain, count, pairwise
from pathlib import Path
from zlib import crc32

import numpy as np

from gpuscore.commands.bulk.rows import AnswerLine, BadTextRow, RowScoring, Settled, TextRow
from gpuscore.commands.bulk.work import RESULTS, TEXTS
from gpuscore.errors import ConfigError
from gpuscore.types.batch import Float64Array

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
    """Yield neighbouring rows whose prompts go into one request: rows with the same first text, or,
    to save requests, rows that each have a first text of their own.

    Args:
        rows: in order.
        most_rows: of one group.
        free_cut: a request's prompts share all that they begin with, not only what their first text
            alone determines; then rows of several first texts may be put together.
        cached: shared prefixes are kept for the next requests, so neighbours may be separated.
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


def _shared(row: TextRow, following: TextRow) -> int:
    """Return how many first bytes two prompts share; a few count as 0."""
    if following is _END:
        return 0
    if row.first != following.first:
        return _alike(row.first, following.first)
    return len(row.first) + _alike(row.rest, following.rest)


def _alike(a: bytes, b: bytes) -> int:
    if a[:WORTHWHILE] != b[:WORTHWHILE]:
        return 0
    least, most = 0, min(len(a), len(b)) + 1  # alike up to `least`, not up to `most`
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if a[:middle] == b[:middle] else (least, middle)
    return least


SCORED, BAD, ANSWERED, FAILED = 1, 2, 3, 4  # kinds of a row's result; 0: none yet
READ_ROWS = 4096
_TEXT_HEAD = struct.Struct("<QII")  # row number, length, checksum


class ResultStore:
    """The results of a job; `width` is the number of scores of a row, at least 1."""

    def __init__(self, folder: Path, width: int) -> None:
        self.width = width
        self._values = 8 * width
        self._size = 1 + self._values + _CHECK.size
        flags = os.O_RDWR | os.O_CREAT
        self._rows = os.open(folder / RESULTS, flags, 0o666)
        self._texts = os.open(folder / TEXTS, flags, 0o666)
        self._end = os.fstat(self._texts).st_size

    def put(self, settled: Settled) -> None:
        """Write results; a row that was written before is overwritten."""
        match settled:
            case RowScoring(numbers, scores):
                rows = np.ascontiguousarray(scores, dtype="<f8").tobytes()
                for index, number in enumerate(numbers):
                    begin = index * self._values
                    self._put(number, SCORED, rows[begin : begin + self._values])
            case BadTextRow(number, reason):
                self._put_text(number, BAD, reason.encode())
            case AnswerLine(number, line, failed):
                self._put_text(number, FAILED if failed else ANSWERED, line)

    def kind(self, number: int) -> int:
        """Return the kind of a row's result; 0 if it is missing or not whole."""
        return self._kind(number, os.pread(self._rows, self._size, number * self._size))

    def scan(self, start: int, count: int) -> tuple[list[int], Float64Array]:
        """Return the kinds of consecutive rows, and their scores [count, width].

        Scores of rows of another kind than SCORED have no meaning.
        """
        data = os.pread(self._rows, self._size * count, self._size * start)
        data = data.ljust(self._size * count, b"\0")
        records = [data[i * self._size : (i + 1) * self._size] for i in range(count)]
        kinds = [self._kind(start + i, record) for i, record in enumerate(records)]
        values = b"".join(record[1 : 1 + self._values] for record in records)
        return kinds, np.frombuffer(values, dtype="<f8").reshape(count, self.width)

    def text(self, number: int) -> bytes:
        """Return the reason of a bad row, or an answer."""
        record = os.pread(self._rows, self._size, number * self._size)
        text = self._text(number, record)
        if text is None:
            raise ValueError(f"row {number} has no text")
        return text

    def kinds(self, rows: int) -> Iterator[int]:
        """Yield the kind of every row's result, up to the last row that has a place."""
        rows = min(rows, -(-os.fstat(self._rows).st_size // self._size))
        for start in range(0, rows, READ_ROWS):
            yield from self.scan(start, min(READ_ROWS, rows - start))[0]

    def holds(self, rows: int) -> bool:
        """Return True if so many rows have a place, and no more."""
        return os.fstat(self._rows).st_size == rows * self._size

    def sync(self) -> None:
        """Have everything written to the disk."""
        os.fsync(self._texts)
        os.fsync(self._rows)

    def close(self) -> None:
        os.close(self._rows)
        os.close(self._texts)

    def _put(self, number: int, kind: int, values: bytes) -> None:
        record = bytes((kind,)) + values
        record += _CHECK.pack(crc32(record, _seed(number)))
        _write(self._rows, record, number * self._size)

    def _put_text(self, number: int, kind: int, text: bytes) -> None:
        head = _TEXT_HEAD.pack(number, len(text), crc32(text))
        _write(self._texts, head + text, self._end)
        self._put(number, kind, self._end.to_bytes(8, "little").ljust(self._values, b"\0"))
        self._end += len(head) + len(text)

    def _kind(self, number: int, record: bytes) -> int:
        kind = self._checked(number, record)
        if kind in (0, SCORED) or self._text(number, record) is not None:
            return kind
        return 0

    def _checked(self, number: int, record: bytes) -> int:
        if len(record) < self._size or not record[0]:
            return 0
        (check,) = _CHECK.unpack(record[-_CHECK.size :])
        right = crc32(record[: -_CHECK.size], _seed(number)) == check
        return record[0] if right else 0

    def _text(self, number: int, record: bytes) -> bytes | None:
        place = int.from_bytes(record[1:9], "little")
        head = os.pread(self._texts, _TEXT_HEAD.size, place)
        if len(head) < _TEXT_HEAD.size:
            return None
        row, length, check = _TEXT_HEAD.unpack(head)
        if place + _TEXT_HEAD.size + length > self._end:  # memory is taken for what is asked for
            return None
        text = os.pread(self._texts, length, place + _TEXT_HEAD.size)
        return text if (row, check) == (number, crc32(text)) else None


def _seed(number: int) -> int:
    """Return the start value of a row's checksum, so that a row at a wrong place does not match."""
    return number & 0xFFFFFFFF


def _write(file: int, data: bytes, place: int) -> None:
    view: Sequence[int] | memoryview = memoryview(data)
    while view:
        written = os.pwrite(file, view, place)  # type: ignore[arg-type]
        view, place = view[written:], place + written
