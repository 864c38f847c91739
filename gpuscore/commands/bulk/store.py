"""Results on disk, by row number.

Each row has a place of fixed size: kind, scores or the position of a text, checksum. A row is done
exactly if its checksum is right, so a write that was cut off by a kill, or that never reached the
disk, counts as not done, and the row is computed again. A text (a reason or an answer) is appended
to a second file before the row that refers to it is written.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from zlib import crc32

import numpy as np

from gpuscore.commands.bulk.rows import AnswerLine, BadTextRow, RowScoring, Settled
from gpuscore.commands.bulk.work import RESULTS, TEXTS
from gpuscore.types.batch import Float64Array

SCORED, BAD, ANSWERED, FAILED = 1, 2, 3, 4  # kinds of a row's result; 0: none yet
READ_ROWS = 4096
_CHECK = struct.Struct("<I")
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
        """Write results; the same row may be written again."""
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
        """Return the kind of a row's result; 0 if there is none, or none that is whole."""
        return self._kind(number, os.pread(self._rows, self._size, number * self._size))

    def scan(self, start: int, count: int) -> tuple[list[int], Float64Array]:
        """Return the kinds of consecutive rows, and their scores [count, width].

        Scores of rows of another kind than SCORED have no meaning.
        """
        found = os.pread(self._rows, self._size * count, self._size * start)
        found = found.ljust(self._size * count, b"\0")
        records = [found[i * self._size : (i + 1) * self._size] for i in range(count)]
        kinds = [self._kind(start + i, record) for i, record in enumerate(records)]
        values = b"".join(record[1 : 1 + self._values] for record in records)
        return kinds, np.frombuffer(values, dtype="<f8").reshape(count, self.width)

    def text(self, number: int) -> bytes:
        """Return the reason of a bad row, or an answer."""
        record = os.pread(self._rows, self._size, number * self._size)
        found = self._text(number, record)
        if found is None:
            raise ValueError(f"row {number} has no text")
        return found

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
    """Return what a row's checksum begins with, so that a row at a wrong place is not right."""
    return number & 0xFFFFFFFF


def _write(file: int, data: bytes, place: int) -> None:
    view: Sequence[int] | memoryview = memoryview(data)
    while view:
        written = os.pwrite(file, view, place)  # type: ignore[arg-type]
        view, place = view[written:], place + written
