"""Reads and writes Parquet files. The only module that needs pyarrow."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import parquet

from gpuscore.commands.bulk.options import BatchOptions
from gpuscore.errors import ConfigError

TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view())


def read_parquet(
    path: Path, columns: Sequence[str], most: int
) -> Iterator[tuple[Any, list[bytes | str]]]:
    """Yield blocks of at most `most` rows, as an Arrow table and as a list. The list has each row's
    `columns` in JSON, or a text that says why the row is bad."""
    # Texts are read as bytes, so that invalid UTF-8 makes only its own row bad.
    kinds = pa.schema([(name, pa.large_binary()) for name in columns])
    with _reading(path), parquet.ParquetFile(path, pre_buffer=False) as file:
        for table in map(pa.table, filter(len, file.iter_batches(most))):
            rows = table.select(columns).cast(kinds).to_pylist()
            yield table, list(map(_encoded, rows))


def _encoded(row: dict[str, bytes | None]) -> bytes | str:
    texts = {}
    for name, value in row.items():
        try:
            texts[name] = None if value is None else value.decode()
        except UnicodeDecodeError as error:
            return f"{name} is not UTF-8: {error.reason}"
    return msgspec.json.encode(texts)


def check_schema(path: Path, options: BatchOptions) -> None:
    """Raise ConfigError if a column is missing, exists twice or is not text, or if the name of the
    scores' column is used already."""
    with _reading(path), parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
    options.check_columns(f"--input {path}", schema.names)
    for name in options.columns:
        if schema.names.count(name) > 1:
            raise ConfigError(f"--input {path} has the column {name} twice")
        kind = schema.field(name).type
        if (kind.value_type if pa.types.is_dictionary(kind) else kind) not in TEXT_TYPES:
            raise ConfigError(f"--input {path}: column {name} is {kind}, not text")


def write_parquet(path: Path, source: Path, name: str, good: Iterable[Any]) -> None:
    """Write the good rows with all columns of `source`, and the scores as column `name`."""
    added = pa.field(name, pa.list_(pa.float64()))
    with parquet.ParquetFile(source) as file:
        schema = file.schema_arrow.append(added)  # with its metadata
    with parquet.ParquetWriter(path, schema) as writer:
        for block, scores in good:
            column = pa.array(scores.values(), added.type)
            table = block.table.take([*scores]).append_column(added, column)
            writer.write_table(table)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"--input {path} cannot be read as Parquet: {error}") from error
