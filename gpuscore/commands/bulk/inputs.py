"""Reads and checks the input file of `gpuscore batch`, in blocks of rows.

No type is guessed: a JSON line is kept as its bytes, and every column of CSV is text. Python's CSV
reader is used, not Arrow's, because it continues after a bad row and knows its line number.
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
MAX_FIELD = 16 * 2**20  # characters; a quote that is never closed must not fill the memory
BLOCK_ROWS = 8192
BLOCK_BYTES = 8 * 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FIRST_ROWS = 1000  # JSON lines have no header, so these rows show which columns exist

# A row as a JSON object in bytes, or a text that says why the row is bad.
Row: TypeAlias = bytes | str


@dataclass(slots=True)
class Block:
    """Consecutive rows of the input, at most BLOCK_ROWS.

    Attributes:
        numbers: the line on which each row begins, or in Parquet the row's number; from 1.
        table: the rows as an Arrow table, for Parquet only.
        size: bytes of the rows.
    """

    numbers: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    table: Any = None
    size: int = 0

    def describe(self, index: int, reason: str) -> dict[str, Any]:
        """Return a bad row's line in OUTPUT.bad.jsonl."""
        unit = "line" if self.table is None else "row"
        row = self.rows[index]
        text = row.decode(errors="backslashreplace") if isinstance(row, bytes) else None
        return {"reason": reason, unit: self.numbers[index], "input": text}


def decoded(line: Row) -> dict[str, Any] | str:
    """Return a row as an object, or a text that says why it is bad."""
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
        block = Block()
        for line, row in _csv(self.path) if self.format == CSV else _lines(self.path):
            block.numbers.append(line)
            block.rows.append(row)
            block.size += len(row)
            if len(block.rows) == BLOCK_ROWS or block.size > BLOCK_BYTES:
                yield block
                block = Block()
        if block.rows:
            yield block

    def digest(self) -> dict[str, str]:
        """Return the file's digest, which shows changes, under the name that errors give it."""
        with self.path.open("rb") as file:
            return {"the SHA-256 of --input": hashlib.file_digest(file, "sha256").hexdigest()}


def _lines(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield all lines that are not empty, cut off after MAX_LINE + 1 bytes."""
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
    """Return the columns of a CSV file; raise ConfigError for no header or two equal names."""
    header = next(_csv_lists(path), (1, None))[1]
    if not isinstance(header, list):
        raise ConfigError(f"--input {path}: the first line is not the header of a CSV file")
    if len(set(header)) < len(header):
        raise ConfigError(f"--input {path}: the header has two equal names: {', '.join(header)}")
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
    """Yield the header and all rows, each with the number of its first line."""
    csv.field_size_limit(MAX_FIELD)  # holds for the process, in which nothing else reads CSV
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
    """Return the input, after all checks that need not read all rows.

    Raises:
        ConfigError: the format is not supported or does not fit the output's suffix, a column is
            missing, not text, or has the name of an output column, or pyarrow is not installed.
    """
    path = Path(options.input)
    output = options.target
    source = Input(path, SUFFIXES.get(path.suffix, ""), options.columns)
    if not source.format:
        raise ConfigError(f"--input {path}; supported: files that end with {', '.join(SUFFIXES)}")
    suffix = ".parquet" if source.format == PARQUET else ".jsonl"
    if output.suffix != suffix:
        raise ConfigError(f"--output {output}: for {source.format} it must end with {suffix}")
    flag = f"--input {path}"
    if options.requests:
        if source.format != JSON_LINES:
            raise ConfigError(f"{flag}: --requests needs JSON lines")
    elif source.format == CSV:
        options.check_columns(flag, read_header(path))
    elif source.format == PARQUET:
        if find_spec("pyarrow") is None:
            raise ConfigError(f"Parquet needs pyarrow: {install('batch')}")
        from gpuscore.commands.bulk.parquet import check_schema

        check_schema(path, options)
    else:
        parsed = (decoded(row) for block in source.blocks() for row in block.rows)
        rows = list(islice(parsed, FIRST_ROWS))
        names = list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))
        if names:  # else no row is an object
            options.check_columns(f"{flag} (its first {len(rows)} rows)", names)
    return source
