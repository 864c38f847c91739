"""The input files of a job: checks at its start, and blocks of their rows.

The bytes of a JSON line are kept, and every column of CSV is text: nothing is guessed. The reader
of CSV is Python's, not Arrow's: it goes on after a bad row and knows its line.
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

from gpuscore.commands.bulk.options import (
    CSV,
    JSON_LINES,
    PARQUET,
    SUFFIXES,
    BatchOptions,
    Decoded,
    Texts,
    kind_of,
)
from gpuscore.errors import ConfigError
from gpuscore.system.extras import install

MAX_LINE = 64 * 2**20  # bytes of one line; a file without line ends must not fill the memory
MAX_FIELD = 16 * 2**20  # characters; bounds the memory that a quote without an end takes
BLOCK_ROWS, BLOCK_BYTES = 8192, 8 * 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FIRST_ROWS = 1000  # of JSON lines, which have no header


@dataclass(slots=True)
class Block:
    """Consecutive rows of a file, at most BLOCK_ROWS.

    Attributes:
        first: number of the first row in the file, from 1; a header is not counted.
        rows: JSON lines without white space around them, or decoded rows of CSV.
        places: the lines on which the rows begin, from 1.
    """

    path: Path
    first: int
    rows: list[bytes | Decoded] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def place(self) -> str:
        return f"--input {self.path}, lines {self.places[0]} to {self.places[-1]}"

    def decoded(self) -> list[Decoded]:
        """Return every row as an object, or the reason why it is not an object."""
        return [_decode(row) if isinstance(row, bytes) else row for row in self.rows]

    def texts(self, options: BatchOptions) -> list[Texts]:
        """Return the texts of every row, or what is wrong with it."""
        return [options.texts_of(row) for row in self.decoded()]

    def lines(self, keep: Sequence[int]) -> list[bytes]:
        """Return the rows with these numbers as JSON, with white space before the last brace."""
        rows = (self.rows[index] for index in keep)
        return [row if isinstance(row, bytes) else msgspec.json.encode(row) for row in rows]

    def table(self, keep: Sequence[int], schema: Any) -> Any:
        """Return the rows with these numbers as an Arrow table."""
        from gpuscore.commands.bulk.parquet import table_of

        rows = self.decoded()
        return table_of([rows[index] for index in keep], schema, self.place)

    def about(self, index: int) -> dict[str, Any]:
        """Return the place and the content of a row, for its line in OUTPUT.bad.jsonl."""
        row = self.rows[index]
        about = {"file": self.path.name, "row": self.first + index, "line": self.places[index]}
        if isinstance(row, bytes):
            is_object = isinstance(_decode(row), dict)
            text = row.decode("utf-8", errors="backslashreplace")
            about["input"] = msgspec.Raw(row) if is_object else text
        elif isinstance(row, dict):
            about["input"] = row
        return about


def _decode(line: bytes) -> Decoded:
    if len(line) > MAX_LINE:
        return f"the line has over {MAX_LINE} bytes"
    try:
        decoded = msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        return f"the line is not UTF-8: {error.reason}"
    except (msgspec.DecodeError, RecursionError) as error:
        return f"the line is not JSON: {error}"
    if not isinstance(decoded, dict):
        return f"the line is {kind_of(decoded)}, not an object"
    return decoded


@dataclass(frozen=True, slots=True)
class InputFiles:
    """Files of one format, in the order of their names."""

    format: str
    paths: tuple[Path, ...]

    def blocks(self) -> Iterator[Any]:
        """Yield all rows of all files, in the same blocks each time; of Parquet, ParquetBlocks."""
        for path in self.paths:
            if self.format == PARQUET:
                from gpuscore.commands.bulk.parquet import read_parquet

                yield from read_parquet(path, BLOCK_ROWS)
            elif self.format == CSV:
                yield from _blocks(path, _csv_rows(path, read_header(path)))
            else:
                lines = ((place, len(line), line) for place, line in _numbered(path) if line)
                yield from _blocks(path, lines)


def _blocks(path: Path, rows: Iterable[tuple[int, int, bytes | Decoded]]) -> Iterator[Block]:
    """Yield blocks of bounded size; `rows` are (line, size in bytes, row)."""
    block, size = Block(path, 1), 0
    for place, length, row in rows:
        block.rows.append(row)
        block.places.append(place)
        size += length
        if block.count == BLOCK_ROWS or size > BLOCK_BYTES:
            yield block
            block, size = Block(path, block.first + block.count), 0
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


def read_header(path: Path) -> list[str]:
    """Return the names of CSV's columns; raise ConfigError for no header, or a name twice."""
    header = next(_csv_lists(path), (1, None))[1]
    if not isinstance(header, list):
        raise ConfigError(f"--input {path}: the first line is no header of a CSV file")
    if len(set(header)) < len(header):
        raise ConfigError(f"--input {path}: the header has a name twice: {', '.join(header)}")
    return header


def _csv_rows(path: Path, header: list[str]) -> Iterator[tuple[int, int, Decoded]]:
    for place, row in islice(_csv_lists(path), 1, None):
        if isinstance(row, str):
            yield place, 0, row
        elif len(row) != len(header):
            yield place, 0, f"the row has {len(row)} fields, the header has {len(header)}"
        else:
            yield place, sum(map(len, row)), dict(zip(header, row, strict=True))


def _csv_lists(path: Path) -> Iterator[tuple[int, list[str] | str]]:
    """Yield each row, the header too, with the number of its first line."""
    csv.field_size_limit(MAX_FIELD)  # of the whole process; nothing else here reads CSV
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        while True:
            place = reader.line_num + 1
            try:
                row = next(reader)
                "".join(row).encode()
            except StopIteration:
                return
            except csv.Error as error:
                to = f" to {reader.line_num}" if reader.line_num > place else ""
                yield place, f"the row is not CSV (lines {place}{to}): {error}"
            except UnicodeEncodeError:  # a byte that is not UTF-8 was read as a lone surrogate
                yield place, "the row is not UTF-8"
            else:
                if row:
                    yield place, row


def find_inputs(options: BatchOptions) -> InputFiles:
    """Return the input's files, after the checks that do not need to read all rows.

    Files of a folder whose names begin with "." or "_" are left out; programs that write folders of
    tables mark them so.

    Raises:
        ConfigError: there are no files, their formats are not supported or differ, the output would
            overwrite one, columns are missing, taken or differ, or pyarrow is not installed.
    """
    place = options.input
    if place.is_dir():
        if options.output.absolute().parent.resolve() == place.resolve():
            raise ConfigError(f"--output {options.output} lies in the folder of --input")
        paths = sorted(path for path in place.iterdir() if path.name[0] not in "._")
    else:
        paths = [place]
    formats = sorted({_format_of(path) for path in paths})
    if len(formats) != 1:
        what = f"mixes {' and '.join(formats)}; supported: one" if formats else "has no files"
        raise ConfigError(f"--input {place} {what}")
    if options.requests and formats != [JSON_LINES]:
        raise ConfigError(f"--input {place}: requests are JSON lines, not {formats[0]}")
    if PARQUET in (*formats, options.output_format) and find_spec("pyarrow") is None:
        raise ConfigError(f"Parquet needs pyarrow: {install('batch')}")
    inputs = InputFiles(formats[0], tuple(paths))
    if inputs.format != JSON_LINES:
        _check_columns(inputs, options)
    elif not options.requests:
        _check_first_rows(inputs, options)
    return inputs


def _format_of(path: Path) -> str:
    if not path.exists():
        raise ConfigError(f"--input {path}: there is no such file or folder")
    if path.suffix not in SUFFIXES or not path.is_file():
        raise ConfigError(f"--input {path}; supported: files that end with {', '.join(SUFFIXES)}")
    return SUFFIXES[path.suffix]


def _check_first_rows(inputs: InputFiles, options: BatchOptions) -> None:
    """Check the fields of the first rows of JSON lines, if at least one row is an object."""
    decoded = chain.from_iterable(block.decoded() for block in inputs.blocks())
    rows = list(islice(decoded, FIRST_ROWS))
    names = dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row)
    if names:
        options.check_columns(f"--input {options.input} (its first {len(rows)} rows)", names)


def _check_columns(inputs: InputFiles, options: BatchOptions) -> None:
    """Check the columns of tables, which must be the same in all files."""
    found: list[str] = []
    for path in inputs.paths:
        if inputs.format == CSV:
            names = columns = read_header(path)
        else:
            from gpuscore.commands.bulk.parquet import check_texts, read_schema

            schema = read_schema(path)
            names, columns = schema.names, [f"{part.name} {part.type}" for part in schema]
        options.check_columns(f"--input {path}", names)
        if inputs.format == PARQUET:
            check_texts(path, schema, options.columns)
        if columns != (found := found or columns):
            raise ConfigError(
                f"--input {path} has other columns than {inputs.paths[0].name}: "
                f"{', '.join(columns)} instead of {', '.join(found)}"
            )


FileState: TypeAlias = tuple[int, int, str]  # size, time of change, SHA-256


def state_of(path: Path) -> FileState:
    return path.stat().st_size, path.stat().st_mtime_ns, sha256_of(path)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_changed(inputs: InputFiles, known: dict[str, FileState], read_all: bool = False) -> None:
    """Raise ConfigError if a file is not as it was known.

    A file of the same size and time counts as unchanged, unless `read_all`; of others the SHA-256
    decides.
    """
    names = [path.name for path in inputs.paths]
    if names != list(known):
        differ = sorted(set(names) ^ set(known)) or names
        raise ConfigError(f"the files of --input changed: {', '.join(differ)}")
    for path in inputs.paths:
        size, mtime_ns, digest = known[path.name]
        same = (path.stat().st_size, path.stat().st_mtime_ns) == (size, mtime_ns)
        if (read_all or not same) and sha256_of(path) != digest:
            raise ConfigError(f"--input {path} changed: its content has another SHA-256")
