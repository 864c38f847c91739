"""The input files of a job: checks at its start, reading, and detection of changed files.

The bytes of a JSON line are written as they were read. Every column of CSV is text: nothing is
guessed. Python's reader is used, not Arrow's: it goes on after a bad row and knows its line.
"""

import csv
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from gpuscore.commands.bulk.options import CSV, JSON_LINES, PARQUET, SUFFIXES, BatchOptions
from gpuscore.commands.bulk.rows import Block, Problem
from gpuscore.errors import ConfigError
from gpuscore.system.extras import install
from gpuscore.types.batch import Float64Array

MAX_LINE = 64 * 2**20  # bytes of one line; a file without line ends must not fill the memory
MAX_FIELD = 16 * 2**20  # characters; bounds the memory that a quote without an end takes
BLOCK_ROWS, BLOCK_BYTES = 4096, 4 * 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Decoded: TypeAlias = dict[str, Any] | Problem


@dataclass(slots=True)
class LineBlock:
    """Rows of a file.

    Attributes:
        first: number of the first row in the file, from 1; a header is not counted.
        rows: JSON lines without white space around them, or decoded rows of CSV.
        places: the lines on which the rows begin, from 1.
    """

    path: Path
    first: int
    rows: list[bytes | Decoded] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    _decoded: list[Decoded] | None = None

    @property
    def count(self) -> int:
        return len(self.rows)

    def decoded(self) -> list[Decoded]:
        """Return every row as an object, or the reason why it is not an object."""
        if self._decoded is None:
            rows = self.rows
            self._decoded = [_decode(row) if isinstance(row, bytes) else row for row in rows]
        return self._decoded

    def texts(self, columns: Sequence[str]) -> list[tuple[str, ...] | Problem]:
        return [_texts(row, columns) for row in self.decoded()]

    def lines(self, keep: Sequence[int], scores: Float64Array, name: str) -> list[bytes]:
        lines, added = [], msgspec.json.encode(name)
        for index, values in zip(keep, scores.tolist(), strict=True):
            row = self.rows[index]
            line = row if isinstance(row, bytes) else msgspec.json.encode(row)
            lines.append(b"%b,%b:%b}" % (line[:-1].rstrip(), added, msgspec.json.encode(values)))
        return lines

    def table(self, keep: Sequence[int], schema: Any) -> Any:
        from gpuscore.commands.bulk.parquet import table_of

        rows = self.decoded()
        return table_of([rows[index] for index in keep], schema)

    def about(self, index: int) -> dict[str, Any]:
        place = {"file": self.path.name, "row": self.first + index, "line": self.places[index]}
        match self.rows[index]:
            case Problem():
                return place
            case bytes(line) if isinstance(self.decoded()[index], dict):
                return {**place, "input": msgspec.Raw(line)}
            case bytes(line):
                return {**place, "input": line.decode("utf-8", errors="backslashreplace")}
            case row:
                return {**place, "input": row}


def read_json_lines(path: Path) -> Iterator[LineBlock]:
    """Yield a file's rows; lines of white space only are no rows."""
    return _blocks(path, ((place, len(line), line) for place, line in _numbered(path) if line))


def read_csv(path: Path) -> Iterator[LineBlock]:
    """Yield a file's rows; empty lines are no rows."""
    return _blocks(path, _csv_rows(path, read_header(path)))


def read_header(path: Path) -> list[str]:
    """Return the names of CSV's columns; raise ConfigError for no header, or a name twice."""
    try:
        header = next(_csv_lists(path), (1, None))[1]
    except UnicodeDecodeError:
        header = None
    if not isinstance(header, list):
        raise ConfigError(f"--input {path}: the first line is no header of a CSV file")
    if len(set(header)) < len(header):
        raise ConfigError(f"--input {path}: the header has a name twice: {', '.join(header)}")
    return header


def _blocks(path: Path, rows: Iterable[tuple[int, int, bytes | Decoded]]) -> Iterator[LineBlock]:
    """Yield blocks of bounded size; `rows` are (line, size in bytes, row)."""
    block, size = LineBlock(path, 1), 0
    for place, length, row in rows:
        block.rows.append(row)
        block.places.append(place)
        size += length
        if block.count == BLOCK_ROWS or size > BLOCK_BYTES:
            yield block
            block, size = LineBlock(path, block.first + block.count), 0
    if block.rows:
        yield block


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines with their numbers; a line that is too long is cut to MAX_LINE + 1 bytes."""
    number = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE + 1):
            number += 1
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE)):
                pass
            yield number, (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).strip()


def _decode(line: bytes) -> Decoded:
    if len(line) > MAX_LINE:
        return Problem(f"the line has over {MAX_LINE} bytes")
    try:
        decoded = msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        return Problem(f"the line is not UTF-8: {error.reason}")
    except (msgspec.DecodeError, RecursionError) as error:
        return Problem(f"the line is not JSON: {error}")
    if not isinstance(decoded, dict):
        return Problem(f"the line is {_kind(decoded)}, not an object")
    return decoded


def _texts(row: Decoded, columns: Sequence[str]) -> tuple[str, ...] | Problem:
    if isinstance(row, Problem):
        return row
    for name in columns:
        if name not in row:
            return Problem(f"there is no field {name}")
        if not isinstance(row[name], str):
            return Problem(f"{name} is {_kind(row[name])}, not text")
    return tuple(row[name] for name in columns)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names = {int: "a number", float: "a number", str: "text", list: "an array", dict: "an object"}
    return names[type(value)]


def _csv_rows(path: Path, header: list[str]) -> Iterator[tuple[int, int, Decoded]]:
    reader = _csv_lists(path)
    next(reader)
    for place, row in reader:
        if isinstance(row, Problem):
            yield place, 0, row
        elif len(row) != len(header):
            problem = f"the row has {len(row)} fields, the header has {len(header)}"
            yield place, 0, Problem(problem)
        else:
            yield place, sum(map(len, row)), dict(zip(header, row, strict=True))


def _csv_lists(path: Path) -> Iterator[tuple[int, list[str] | Problem]]:
    """Yield each row, the header too, with the number of its first line."""
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


FIRST_ROWS = 1000  # of JSON lines, which have no header


@dataclass(frozen=True, slots=True)
class InputFiles:
    """Files of one format, in the order of their names."""

    format: str
    paths: tuple[Path, ...]


class FileState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The size, the time of change and the SHA-256 of a file."""

    size: int
    mtime_ns: int
    sha256: str


def find_inputs(options: BatchOptions) -> InputFiles:
    """Return the input's files.

    Files of a folder whose names begin with "." or "_" are left out; programs that write folders of
    tables mark them so.

    Raises:
        ConfigError: there are no files, their formats are not supported or differ, or the output
            would overwrite a file of the input.
    """
    place = options.input
    if place.is_dir():
        if options.output.absolute().parent.resolve() == place.resolve():
            raise ConfigError(f"--output {options.output} lies in the folder of --input")
        paths = sorted(path for path in place.iterdir() if path.name[0] not in "._")
        if not paths:
            raise ConfigError(f"--input {place}: the folder has no files")
    elif place.is_file():
        paths = [place]
    else:
        raise ConfigError(f"--input {place}: there is no such file or folder")
    formats = {_format_of(path) for path in paths}
    if len(formats) > 1:
        raise ConfigError(f"--input {place} mixes {' and '.join(sorted(formats))}; supported: one")
    (input_format,) = formats
    if options.requests and input_format != JSON_LINES:
        raise ConfigError(f"--input {place}: requests are JSON lines, not {input_format}")
    return InputFiles(input_format, tuple(paths))


def _format_of(path: Path) -> str:
    if path.suffix not in SUFFIXES or not path.is_file():
        raise ConfigError(f"--input {path}; supported: files that end with {', '.join(SUFFIXES)}")
    return SUFFIXES[path.suffix]


def check_inputs(inputs: InputFiles, options: BatchOptions) -> None:
    """Make the checks that do not need to read all rows.

    Raises:
        ConfigError: a file lacks a column or has scores already, the files' columns differ, or
            Parquet needs pyarrow, which is not installed.
    """
    if PARQUET in (inputs.format, options.output_format) and find_spec("pyarrow") is None:
        raise ConfigError(f"Parquet needs pyarrow: {install('batch')}")
    if inputs.format == JSON_LINES:
        if not options.requests:
            _check_first_rows(inputs, options)
        return
    first, *others = (_columns(path, inputs, options) for path in inputs.paths)
    for path, other in zip(inputs.paths[1:], others, strict=True):
        if other != first:
            raise ConfigError(
                f"--input {path} has other columns than {inputs.paths[0].name}: "
                f"{_shown(other)} instead of {_shown(first)}"
            )


def table_schema(inputs: InputFiles, of_rows: bytes | None) -> Any:
    """Return the Arrow schema of the input's columns.

    Args:
        of_rows: the schema that was found in all rows, which JSON lines need.
    """
    from gpuscore.commands.bulk import parquet

    if inputs.format == PARQUET:
        return parquet.read_schema(inputs.paths[0])
    if inputs.format == CSV:
        return parquet.schema_of_texts(read_header(inputs.paths[0]))
    return parquet.schema_of_bytes(of_rows or b"")


def read_blocks(inputs: InputFiles, options: BatchOptions, every_column: bool) -> Iterator[Block]:
    """Yield all rows of all files; without `every_column`, perhaps with the scored columns only."""
    for path in inputs.paths:
        if inputs.format == PARQUET:
            from gpuscore.commands.bulk.parquet import read_parquet

            yield from read_parquet(path, None if every_column else options.columns)
        elif inputs.format == CSV:
            yield from read_csv(path)
        else:
            yield from read_json_lines(path)


def _columns(path: Path, inputs: InputFiles, options: BatchOptions) -> Any:
    """Return a table's columns, after checking that the needed columns are there."""
    if inputs.format == CSV:
        header = read_header(path)
        options.check_columns(f"--input {path}", header)
        return header
    from gpuscore.commands.bulk.parquet import check_columns, read_schema

    schema = read_schema(path)
    options.check_columns(f"--input {path}", schema.names)
    check_columns(path, schema, options.columns)
    return schema


def _check_first_rows(inputs: InputFiles, options: BatchOptions) -> None:
    """Check the fields of the first rows of JSON lines, if at least one row is an object."""
    blocks = (block for path in inputs.paths for block in read_json_lines(path))
    decoded = chain.from_iterable(block.decoded() for block in blocks)
    rows = list(islice(decoded, FIRST_ROWS))
    names = dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row)
    if names:
        options.check_columns(f"--input {options.input} (its first {len(rows)} rows)", names)


def _shown(columns: Any) -> str:
    if isinstance(columns, Sequence):
        return ", ".join(columns)
    return ", ".join(f"{field.name} {field.type}" for field in columns)


def identify(inputs: InputFiles) -> dict[str, FileState]:
    """Return the state of each file, by name; reads every file."""
    return {path.name: FileState(*_stat(path), sha256_of(path)) for path in inputs.paths}


def refuse_changed(inputs: InputFiles, known: dict[str, FileState], read_all: bool = False) -> None:
    """Raise ConfigError if a file has changed since `identify` saw it.

    A file of the same size and time counts as unchanged. A file with another time is read, and its
    SHA-256 decides; with `read_all` every file is read.
    """
    names = [path.name for path in inputs.paths]
    if names != list(known):
        differ = sorted(set(names) ^ set(known)) or names
        raise ConfigError(f"the files of --input changed: {', '.join(differ)}")
    for path in inputs.paths:
        was, (size, time) = known[path.name], _stat(path)
        if was.size != size:
            raise ConfigError(f"--input {path} changed: it had {was.size} bytes and has {size}")
        if (read_all or was.mtime_ns != time) and sha256_of(path) != was.sha256:
            raise ConfigError(f"--input {path} changed: its content has another SHA-256")


def _stat(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
