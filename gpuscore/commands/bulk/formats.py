"""The readers of all formats, by name."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import chain, islice
from typing import Any

from gpuscore.commands.bulk.csv_rows import read_csv, read_header
from gpuscore.commands.bulk.inputs import InputFiles
from gpuscore.commands.bulk.json_lines import read_json_lines
from gpuscore.commands.bulk.options import CSV, JSON_LINES, PARQUET, BatchOptions
from gpuscore.commands.bulk.rows import Block
from gpuscore.errors import ConfigError

FIRST_ROWS = 1000  # of JSON lines, which have no header


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


def table_schema(inputs: InputFiles, options: BatchOptions) -> Any:
    """Return the Arrow schema of the input's columns; None if all rows must be seen to know it."""
    from gpuscore.commands.bulk import parquet

    if inputs.format == PARQUET:
        return parquet.read_schema(inputs.paths[0])
    if inputs.format == CSV:
        return parquet.schema_of_texts(read_header(inputs.paths[0]))
    return None


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


def _columns(path: Any, inputs: InputFiles, options: BatchOptions) -> Any:
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
