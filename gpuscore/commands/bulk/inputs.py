"""The input files of a job: checks at its start, reading, and how a change of them is found."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec

from gpuscore.commands.bulk.line_rows import read_csv, read_header, read_json_lines
from gpuscore.commands.bulk.options import CSV, JSON_LINES, PARQUET, SUFFIXES, BatchOptions
from gpuscore.commands.bulk.rows import Block
from gpuscore.errors import ConfigError

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
        ConfigError: there are none, their formats are not supported or differ, or the output would
            be one of them.
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
    (found,) = formats
    if options.requests and found != JSON_LINES:
        raise ConfigError(f"--input {place}: requests are JSON lines, not {found}")
    return InputFiles(found, tuple(paths))


def _format_of(path: Path) -> str:
    if path.suffix not in SUFFIXES or not path.is_file():
        raise ConfigError(f"--input {path}; supported: files that end with {', '.join(SUFFIXES)}")
    return SUFFIXES[path.suffix]


def check_inputs(inputs: InputFiles, options: BatchOptions) -> None:
    """Check what can be known without reading all rows.

    Raises:
        ConfigError: a file lacks a column or has scores already, the files' columns differ, or
            Parquet needs pyarrow, which is not installed.
    """
    if PARQUET in (inputs.format, options.output_format) and find_spec("pyarrow") is None:
        raise ConfigError("Parquet needs pyarrow: pip install 'gpuscore[batch]'")
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
    """Yield all rows of all files; without `every_column` those that are scored may be enough."""
    for path in inputs.paths:
        if inputs.format == PARQUET:
            from gpuscore.commands.bulk.parquet import read_parquet

            yield from read_parquet(path, None if every_column else options.columns)
        elif inputs.format == CSV:
            yield from read_csv(path)
        else:
            yield from read_json_lines(path)


def _columns(path: Path, inputs: InputFiles, options: BatchOptions) -> Any:
    """Return a table's columns, after a check of those that are needed."""
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
    """Check the fields of the first rows of JSON lines, unless none of them is an object."""
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
    """Raise ConfigError if a file is not the one that `identify` saw.

    A file of the same size and time counts as the same. One with another time is read, and its
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
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
