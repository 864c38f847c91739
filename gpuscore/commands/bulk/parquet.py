"""Parquet, and the conversion of other formats into it. The only module that needs pyarrow."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import parquet

from gpuscore.commands.bulk.options import BatchOptions, Decoded, Texts
from gpuscore.errors import ConfigError

GROUP_BYTES = 64 * 2**20  # of a row group that is written
SCORES_TYPE = pa.list_(pa.float64())
TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view())
REMEDY = "write JSON lines instead, which keep every row as it is"


@dataclass(frozen=True, slots=True)
class ParquetBlock:
    """Rows of a file, with the methods of `Block`; `first` is the number of the first, from 1."""

    path: Path
    first: int
    rows: Any  # pa.Table

    @property
    def count(self) -> int:
        return len(self.rows)

    def texts(self, options: BatchOptions) -> list[Texts]:
        # As bytes: one text that is not UTF-8 must not spoil the others.
        kinds = pa.schema([(name, pa.large_binary()) for name in options.columns])
        rows = self.rows.select(options.columns)
        for index, name in enumerate(options.columns):
            if pa.types.is_dictionary(kind := rows.schema.field(name).type):
                rows = rows.set_column(index, name, rows.column(name).cast(kind.value_type))
        return [options.texts_of(_decoded(row)) for row in rows.cast(kinds).to_pylist()]

    def lines(self, keep: Sequence[int]) -> list[bytes]:
        return [msgspec.json.encode(row) for row in _objects(self.table(keep))]

    def table(self, keep: Sequence[int], schema: Any = None) -> Any:
        return self.rows if len(keep) == self.count else self.rows.take(pa.array(keep, pa.int64()))

    def about(self, index: int) -> dict[str, Any]:
        place = {"file": self.path.name, "row": self.first + index}
        try:
            return {**place, "input": _objects(self.rows.slice(index, 1))[0]}
        except UnicodeDecodeError:
            return place

    def check_json(self) -> None:
        """Raise ConfigError for values that JSON lines cannot hold: text that is not UTF-8, NaN and
        infinity."""
        for name in self.rows.column_names:
            try:
                json.dumps(_objects(self.rows.select([name])), allow_nan=False, default=str)
            except ValueError as error:
                bad = isinstance(error, UnicodeDecodeError)
                what = (
                    "text that is not UTF-8" if bad else "NaN or infinity, which JSON cannot hold"
                )
                raise ConfigError(
                    f"--input {self.path}: column {name} has {what}; write Parquet instead"
                ) from error


def _decoded(row: dict[str, bytes | None]) -> Decoded:
    texts: dict[str, Any] = {}
    for name, value in row.items():
        try:
            texts[name] = None if value is None else value.decode()
        except UnicodeDecodeError as error:
            return f"{name} is not UTF-8: {error.reason}"
    return texts


def _objects(table: Any) -> list[dict[str, Any]]:
    """Return rows as Python's objects, which cannot hold nanoseconds: these become text."""
    target = pa.schema([part.with_type(_json_type(part.type)) for part in table.schema])
    rows: list[dict[str, Any]] = table.cast(target).to_pylist()
    return rows


def _json_type(kind: Any) -> Any:
    nanoseconds = pa.types.is_temporal(kind) and getattr(kind, "unit", None) == "ns"
    return pa.string() if nanoseconds else kind


def read_parquet(path: Path, most: int) -> Iterator[ParquetBlock]:
    """Yield a file's rows, at most so many at a time."""
    with _reading(path), parquet.ParquetFile(path, pre_buffer=False) as file:
        first = 1
        for batch in file.iter_batches(most):
            if len(batch):
                yield ParquetBlock(path, first, pa.Table.from_batches([batch]))
                first += len(batch)


def read_schema(path: Path) -> Any:
    """Return a file's schema with its metadata."""
    with _reading(path), parquet.ParquetFile(path) as file:
        return file.schema_arrow


def check_texts(path: Path, schema: Any, columns: Sequence[str]) -> None:
    """Raise ConfigError if a column is there twice, or is not text."""
    for name in columns:
        if schema.names.count(name) > 1:
            raise ConfigError(f"--input {path} has the column {name} twice")
        kind = schema.field(name).type
        if (kind.value_type if pa.types.is_dictionary(kind) else kind) not in TEXT_TYPES:
            raise ConfigError(f"--input {path}: column {name} is {kind}, not text")


def schema_of_texts(names: Sequence[str]) -> Any:
    """Return the schema of columns that are all text."""
    return pa.schema([(name, pa.string()) for name in names])


def schema_of_bytes(content: bytes) -> Any:
    return pa.ipc.read_schema(pa.py_buffer(content))


def widened(schema: Any, rows: Sequence[dict[str, Any]], place: str) -> Any:
    """Return a schema that holds further objects, too: a field with integers and floats becomes
    float, one with null and another type gets that type, and all other types must agree."""
    names = dict.fromkeys(name for row in rows for name in row)
    with _converting(place):
        columns = {name: pa.array([row.get(name) for row in rows]) for name in names}
        more = pa.schema([(name, column.type) for name, column in columns.items()])
        return pa.unify_schemas([schema, more], promote_options="permissive")


def table_of(rows: Sequence[Any], schema: Any, place: str) -> Any:
    """Return objects as a table; raise ConfigError if a value would not survive in its column."""
    with _converting(place):
        return pa.Table.from_pylist(list(rows), schema=schema)


def check_writable(schema: Any, name: str) -> None:
    """Raise ConfigError if Parquet cannot hold the schema, such as an object without fields."""
    with _converting("--output"):
        ParquetOutput(BytesIO(), schema, name).close()


class ParquetOutput:
    """A Parquet file of rows and their scores, in a column `name`."""

    def __init__(self, file: Any, schema: Any, name: str) -> None:
        self.schema, self._all = schema, schema.append(pa.field(name, SCORES_TYPE))
        self._writer = parquet.ParquetWriter(file, self._all)
        self._waiting: list[Any] = []

    def write(self, table: Any, scores: Sequence[list[float]]) -> None:
        """Add rows with their scores; row groups have a bounded size."""
        columns = [*table.columns, pa.array(scores, SCORES_TYPE)]
        self._waiting.append(pa.Table.from_arrays(columns, schema=self._all))
        if sum(part.nbytes for part in self._waiting) >= GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting))
        self._waiting = []


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"--input {path} cannot be read as Parquet: {error}") from error


@contextmanager
def _converting(place: str) -> Iterator[None]:
    """Raise errors of types as ConfigError."""
    try:
        yield
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise ConfigError(f"{place}: Parquet cannot hold these rows: {error}; {REMEDY}") from error
