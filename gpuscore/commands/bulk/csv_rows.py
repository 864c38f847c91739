"""CSV with a header line, as RFC 4180 has it. Every column is text: nothing is guessed.

Python's reader is used, not Arrow's: it goes on after a bad row and knows its line.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gpuscore.commands.bulk.json_lines import BLOCK_BYTES, BLOCK_ROWS
from gpuscore.commands.bulk.rows import Problem
from gpuscore.errors import ConfigError
from gpuscore.types.arrays import Float64Array

MAX_FIELD = 16 * 2**20  # characters; bounds the memory that a quote without an end takes


@dataclass(slots=True)
class CsvBlock:
    """Rows of a file.

    Attributes:
        first: number of the first row in the file, from 1; the header is not counted.
        places: the lines on which the rows begin, from 1.
    """

    path: Path
    header: list[str]
    first: int
    rows: list[list[str] | Problem] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.rows)

    def texts(self, columns: Sequence[str]) -> list[tuple[str, ...] | Problem]:
        indices = [self.header.index(name) for name in columns]
        return [
            row if isinstance(row, Problem) else tuple(row[index] for index in indices)
            for row in self.rows
        ]

    def lines(self, keep: Sequence[int], scores: Float64Array, name: str) -> list[bytes]:
        rows = (self._object(index) for index in keep)
        return [
            msgspec.json.encode({**row, name: values})
            for row, values in zip(rows, scores.tolist(), strict=True)
        ]

    def table(self, keep: Sequence[int], schema: Any) -> Any:
        from gpuscore.commands.bulk.parquet import table_of

        return table_of([self._object(index) for index in keep], schema)

    def about(self, index: int) -> dict[str, Any]:
        place = {"file": self.path.name, "row": self.first + index, "line": self.places[index]}
        row = self.rows[index]
        return place if isinstance(row, Problem) else {**place, "input": self._object(index)}

    def _object(self, index: int) -> dict[str, str]:
        row = self.rows[index]
        assert not isinstance(row, Problem)  # noqa: S101  (only rows with texts are scored)
        return dict(zip(self.header, row, strict=True))


def read_header(path: Path) -> list[str]:
    """Return the names of the columns; raise ConfigError for no header, or a name twice."""
    try:
        header = next(_reader(path), (1, None))[1]
    except UnicodeDecodeError:
        header = None
    if not isinstance(header, list):
        raise ConfigError(f"--input {path}: the first line is no header of a CSV file")
    if len(set(header)) < len(header):
        raise ConfigError(f"--input {path}: the header has a name twice: {', '.join(header)}")
    return header


def read_csv(path: Path) -> Iterator[CsvBlock]:
    """Yield a file's rows; empty lines are no rows."""
    header = read_header(path)
    reader = _reader(path)
    next(reader)
    block, size, rows = CsvBlock(path, header, 1), 0, 0
    for place, row in reader:
        if isinstance(row, list) and len(row) != len(header):
            row = Problem(f"the row has {len(row)} fields, the header has {len(header)}")
        block.rows.append(row)
        block.places.append(place)
        rows, size = rows + 1, size + (sum(map(len, row)) if isinstance(row, list) else 0)
        if block.count == BLOCK_ROWS or size > BLOCK_BYTES:
            yield block
            block, size = CsvBlock(path, header, rows + 1), 0
    if block.rows:
        yield block


def _reader(path: Path) -> Iterator[tuple[int, list[str] | Problem]]:
    """Yield each row with the number of its first line."""
    csv.field_size_limit(MAX_FIELD)  # of the whole process; nothing else here reads CSV
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        while True:
            place = reader.line_num + 1
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                to = f" to {reader.line_num}" if reader.line_num > place else ""
                yield place, Problem(f"the row is not CSV (lines {place}{to}): {error}")
                continue
            if row:
                yield place, row if _is_utf8(row) else Problem("the row is not UTF-8")


def _is_utf8(row: list[str]) -> bool:
    """Return False if a byte was read as a lone surrogate, because it is not UTF-8."""
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        return False
    return True
