"""The input files of a job: checks at its start, and blocks of their rows.

The bytes of a JSON line are kept, and every column of CSV is text: nothing is guessed. The reader
of CSV is Python's, not Arrow's: it goes on after a bad row and knows its line.
"""

import csv
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain, islice
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
    """Consecutive rows of a file, at most BLOCK_ROWS.

    Attributes:
        first: number of the first row in the file, from 1; a header is not counted.
        rows: of Parquet, with the columns that are read.
        lines: the lines on which the rows begin, from 1; none in Parquet.
        table: all columns of Parquet.
    """

    path: Path
    first: int
    rows: list[Row] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    table: Any = None

    def objects(self) -> list[dict[str, Any] | str]:
        """Return every row as an object, or the reason why it is not an object."""
        return [_decoded(row) if isinstance(row, bytes) else row for row in self.rows]

    def about(self, index: int) -> dict[str, Any]:
        """Return the place and the content of a row, for its line in OUTPUT.bad.jsonl."""
        row: Row = self.rows[index]
        about: dict[str, Any] = {"file": self.path.name, "row": self.first + index}
        if self.lines:
            about["line"] = self.lines[index]
        if isinstance(row, bytes):
            whole = isinstance(_decoded(row), dict)
            text = row.decode("utf-8", errors="backslashreplace")
            about["input"] = msgspec.Raw(row) if whole else text
        return about


def _decoded(line: bytes) -> dict[str, Any] | str:
    if len(line) > MAX_LINE:
        return f"the line has over {MAX_LINE} bytes"
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except UnicodeDecodeError as error:
        return f"the line is not UTF-8: {error.reason}"
    except (msgspec.DecodeError, RecursionError) as error:
        return f"the line is not a JSON object: {error}"


@dataclass(frozen=True, slots=True)
class InputFiles:
    """Files of one format, in the order of their names, and the columns that are read."""

    format: str
    paths: tuple[Path, ...]
    columns: list[str]

    def blocks(self) -> Iterator[Block]:
        """Yield all rows of all files, in the same blocks each time."""
        for path in self.paths:
            if self.format == PARQUET:
                from gpuscore.commands.bulk.parquet import read_parquet

                first = 1
                for table, rows in read_parquet(path, self.columns, BLOCK_ROWS):
                    yield Block(path, first, rows, table=table)
                    first += len(rows)
            else:
                yield from _blocks(path, _csv(path) if self.format == CSV else _lines(path))

    def digests(self) -> dict[str, Any]:
        """Return what tells whether a file has changed, by the name that errors have for it."""
        digests = {}
        for path in self.paths:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            digests[f"the SHA-256 of --input's {path.name}"] = digest
        return digests


def _blocks(path: Path, rows: Iterable[tuple[int, Row]]) -> Iterator[Block]:
    """Yield blocks of bounded size of rows with their lines."""
    block, size = Block(path, 1), 0
    for line, row in rows:
        block.rows.append(row)
        block.lines.append(line)
        size += len(row)
        if len(block.rows) == BLOCK_ROWS or size > BLOCK_BYTES:
            yield block
            block, size = Block(path, block.first + len(block.rows)), 0
    if block.rows:
        yield block


def _lines(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the lines that are not empty; one that is too long is cut to MAX_LINE + 1 bytes."""
    number = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE + 1):
            number += 1
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE)):
                pass
            line = (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).strip()
            if line:
                yield number, line


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
                to = f" to {reader.line_num}" if reader.line_num > line else ""
                yield line, f"the row is not CSV (lines {line}{to}): {error}"
            except UnicodeEncodeError:  # a byte that is not UTF-8 was read as a lone surrogate
                yield line, "the row is not UTF-8"
            else:
                if row:
                    yield line, row


def find_inputs(options: BatchOptions) -> InputFiles:
    """Return the input's files, after all checks that do not need to read all rows.

    Files of a folder whose names begin with "." or "_" are left out; programs that write folders of
    tables mark them so.

    Raises:
        ConfigError: there are no files, their formats are not supported or differ, the output would
            overwrite one or has another suffix, columns are missing, taken or differ, or pyarrow is
            not installed.
    """
    place, output = Path(options.input), options.target
    paths = [place]
    if place.is_dir():
        if output.absolute().parent.resolve() == place.resolve():
            raise ConfigError(f"--output {output} lies in the folder of --input")
        paths = sorted(path for path in place.iterdir() if path.name[0] not in "._")
    formats = {SUFFIXES.get(path.suffix, "") for path in paths}
    if len(formats) != 1 or "" in formats:
        what = f"supported: files of one format, which end with {', '.join(SUFFIXES)}"
        raise ConfigError(f"--input {place}; {what}")
    inputs = InputFiles(formats.pop(), tuple(paths), options.columns)
    suffix = ".parquet" if inputs.format == PARQUET else ".jsonl"
    if output.suffix != suffix:
        raise ConfigError(f"--output {output}: of {inputs.format}, it must end with {suffix}")
    _check_columns(inputs, options)
    return inputs


def _check_columns(inputs: InputFiles, options: BatchOptions) -> None:
    if options.requests:
        if inputs.format != JSON_LINES:
            raise ConfigError(f"--input {options.input}: requests are JSON lines")
    elif inputs.format == CSV:
        for path in inputs.paths:
            options.check_columns(f"--input {path}", read_header(path))
    elif inputs.format == PARQUET:
        if find_spec("pyarrow") is None:
            raise ConfigError(f"Parquet needs pyarrow: {install('batch')}")
        from gpuscore.commands.bulk.parquet import check_schemas

        check_schemas(inputs.paths, options)
    else:
        objects = chain.from_iterable(block.objects() for block in inputs.blocks())
        rows = list(islice(objects, FIRST_ROWS))
        names = list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))
        if names:  # else no row is an object
            options.check_columns(f"--input {options.input} (its first {len(rows)} rows)", names)
