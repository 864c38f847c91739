"""The input of a job: checks at its start, and blocks of its rows.

The bytes of a JSON line are kept, and every column of CSV is text: nothing is guessed. The reader
of CSV is Python's, not Arrow's: it goes on after a bad row and knows its line.
"""

import csv
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from gpuscore.commands.bulk.options import CSV, JSON_LINES, PARQUET, SUFFIXES, BatchOptions
from gpuscore.errors import ConfigError
from gpuscore.system.extras import install

MAX_LINE = 64 * 2**20  # bytes of one line; a file without line ends must not fill the memory
MAX_FIELD = 16 * 2**20  # characters; bounds the memory that a quote without an end takes
BLOCK_ROWS, BLOCK_BYTES = 8192, 8 * 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FIRST_ROWS = 1000  # of JSON lines, which have no header

# An object as JSON, of JSON lines the line as it is, or the reason why the row is bad.
Row: TypeAlias = bytes | str


@dataclass(slots=True)
class Block:
    """Consecutive rows of the input, at most BLOCK_ROWS.

    Attributes:
        numbers: the lines on which the rows begin, or the rows in Parquet; from 1.
        table: all columns of Parquet.
    """

    numbers: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    table: Any = None

    def about(self, index: int, reason: str) -> dict[str, Any]:
        """Return a bad row's place and content, for its line in OUTPUT.bad.jsonl."""
        place, row = "line" if self.table is None else "row", self.rows[index]
        text = row.decode(errors="backslashreplace") if isinstance(row, bytes) else None
        return {"reason": reason, place: self.numbers[index], "input": text}


def decoded(line: Row) -> dict[str, Any] | str:
    """Return a row as an object, or the reason why it is none."""
    if isinstance(line, str):
        return line
    if len(line) > MAX_LINE:
        return f"the line has over {MAX_LINE} bytes"
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except UnicodeDecodeError as error:
        return f"the line is not UTF-8: {error.reason}"
    except (msgspec.DecodeError, RecursionError) as error:
        return f"the line is not a JSON object: {error}"


@dataclass(frozen=True, slots=True)
class Input:
    """A file of rows, its format, and the columns that are read."""

    path: Path
    format: str
    columns: list[str]

    def blocks(self) -> Iterator[Block]:
        """Yield all rows, in the same blocks each time."""
        if self.format == PARQUET:
            from gpuscore.commands.bulk.parquet import read_parquet

            numbers = count(1)
            for table, rows in read_parquet(self.path, self.columns, BLOCK_ROWS):
                yield Block([*islice(numbers, len(rows))], rows, table)
            return
        block, size = Block(), 0
        for line, row in _csv(self.path) if self.format == CSV else _lines(self.path):
            block.numbers.append(line)
            block.rows.append(row)
            size += len(row)
            if len(block.rows) == BLOCK_ROWS or size > BLOCK_BYTES:
                yield block
                block, size = Block(), 0
        if block.rows:
            yield block

    def digest(self) -> dict[str, str]:
        """Return what tells whether the file has changed, by the name that errors have for it."""
        with self.path.open("rb") as file:
            return {"the SHA-256 of --input": hashlib.file_digest(file, "sha256").hexdigest()}


def _lines(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the lines that are not empty; one that is too long is cut to MAX_LINE + 1 bytes."""
    with path.open("rb") as file:
        lines = iter(lambda: file.readline(MAX_LINE + 1), b"")
        for number, line in enumerate(lines, 1):
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE)):
                pass
            text = (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).strip()
            if text:
                yield number, text


def read_header(path: Path) -> list[str]:
    """Return the names of CSV's columns; raise ConfigError for no header, or a name twice."""
    header = next(_csv_lists(path), (1, None))[1]
    if not isinstance(header, list):
        raise ConfigError(f"--input {path}: the first line is no header of a CSV file")
    if len(set(header)) < len(header):
        raise ConfigError(f"--input {path}: the header has a name twice: {', '.join(header)}")
    return header


def _csv(path: Path) -> Iterator[tuple[int, Row]]:
    header = read_header(path)
    for line, row in islice(_csv_lists(path), 1, None):
        if isinstance(row, str):
            yield line, row
        elif len(row) != len(header):
            yield line, f"the row has {len(row)} fields, the header has {len(header)}"
        else:
            yield line, msgspec.json.encode(dict(zip(header, row, strict=True)))


def _csv_lists(path: Path) -> Iterator[tuple[int, list[str] | str]]:
    """Yield each row, the header too, with the number of its first line."""
    csv.field_size_limit(MAX_FIELD)  # of the whole process; nothing else here reads CSV
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader)
                "".join(row).encode()
            except StopIteration:
                return
            except csv.Error as error:
                yield line, f"the row is not CSV (lines {line} to {reader.line_num}): {error}"
            except UnicodeEncodeError:  # a byte that is not UTF-8 was read as a lone surrogate
                yield line, "the row is not UTF-8"
            else:
                if row:
                    yield line, row


def find_input(options: BatchOptions) -> Input:
    """Return the input, after all checks that do not need to read all rows.

    Raises:
        ConfigError: its format is not supported, the output has another suffix, columns are
            missing, taken or no text, or pyarrow is not installed.
    """
    path, output = Path(options.input), options.target
    found = Input(path, SUFFIXES.get(path.suffix, ""), options.columns)
    if not found.format:
        raise ConfigError(f"--input {path}; supported: files that end with {', '.join(SUFFIXES)}")
    suffix = ".parquet" if found.format == PARQUET else ".jsonl"
    if output.suffix != suffix:
        raise ConfigError(f"--output {output}: of {found.format}, it must end with {suffix}")
    place = f"--input {path}"
    if options.requests:
        if found.format != JSON_LINES:
            raise ConfigError(f"{place}: requests are JSON lines")
    elif found.format == CSV:
        options.check_columns(place, read_header(path))
    elif found.format == PARQUET:
        if find_spec("pyarrow") is None:
            raise ConfigError(f"Parquet needs pyarrow: {install('batch')}")
        from gpuscore.commands.bulk.parquet import check_schema

        check_schema(path, options)
    else:
        objects = (decoded(row) for block in found.blocks() for row in block.rows)
        rows = list(islice(objects, FIRST_ROWS))
        names = list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))
        if names:  # else no row is an object
            options.check_columns(f"{place} (its first {len(rows)} rows)", names)
    return found
