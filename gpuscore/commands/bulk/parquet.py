"""Parquet, and the conversion of other formats into it. The only module that needs pyarrow."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import parquet

from gpuscore.commands.bulk.inputs import Decoded, Problem, texts_of
from gpuscore.commands.bulk.options import BatchOptions
from gpuscore.errors import ConfigError

GROUP_BYTES = 64 * 2**20  # of a row group that is written
SCORES_TYPE = pa.list_(pa.float64())
REMEDY = "write JSON lines instead, which keep every row as it is"


@dataclass(frozen=True, slots=True)
class ParquetBlock:
    """Rows of a file, as `Block` describes them; `first` is the number of the first, from 1."""

    path: Path
    first: int
    rows: Any  # pa.Table

    @property
    def count(self) -> int:
        return len(self.rows)

    def texts(self, options: BatchOptions) -> list[tuple[str, ...] | Problem]:
        names = options.columns
        found = [_texts(self.rows.column(name), name) for name in names]
        rows = (dict(zip(names, values, strict=True)) for values in zip(*found, strict=True))
        return [_bad_of(row) or texts_of(row, options) for row in rows]

    def lines(self, keep: Sequence[int]) -> list[bytes]:
        return [msgspec.json.encode(row) for row in _objects(self.table(keep, None))]

    def table(self, keep: Sequence[int], _: Any) -> Any:
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
            except UnicodeDecodeError as error:
                what = f"column {name} is not UTF-8: {error.reason}"
                raise ConfigError(f"--input {self.path}: {what}; write Parquet instead") from error
            except ValueError as error:
                what = f"column {name} has NaN or infinity, which JSON cannot hold"
                raise ConfigError(f"--input {self.path}: {what}; write Parquet instead") from error


def _texts(column: Any, name: str) -> list[str | None | Problem]:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    # As bytes: one text that is not UTF-8 must not spoil the others.
    return [_text(value, name) for value in column.cast(pa.large_binary()).to_pylist()]


def _text(value: bytes | None, name: str) -> str | None | Problem:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError as error:
        return Problem(f"{name} is not UTF-8: {error.reason}")


def _bad_of(row: dict[str, Any]) -> Problem | None:
    return next((value for value in row.values() if isinstance(value, Problem)), None)


def _objects(table: Any) -> list[dict[str, Any]]:
    """Return rows as Python's objects, which cannot hold nanoseconds: these become text."""
    target = pa.schema([part.with_type(_json_type(part.type)) for part in table.schema])
    rows: list[dict[str, Any]] = table.cast(target).to_pylist()
    return rows


def _json_type(kind: Any) -> Any:
    if pa.types.is_temporal(kind) and str(getattr(kind, "unit", "")) == "ns":
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_json_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([part.with_type(_json_type(part.type)) for part in kind])
    return kind


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
        value = kind.value_type if pa.types.is_dictionary(kind) else kind
        if value not in (pa.string(), pa.large_string(), pa.string_view()):
            raise ConfigError(f"--input {path}: column {name} is {kind}, not text")


def schema_of_texts(names: Sequence[str]) -> Any:
    """Return the schema of columns that are all text."""
    return pa.schema([(name, pa.string()) for name in names])


def widened(schema: Any, rows: Sequence[Decoded], place: str) -> Any:
    """Return a schema that holds further objects, too: a field with integers and floats becomes
    float, one with null and another type gets that type, and all other types must agree."""
    names = dict.fromkeys(name for row in rows for name in row)
    with _converting(place):
        columns = {name: pa.array([row.get(name) for row in rows]) for name in names}
        more = pa.schema([(name, column.type) for name, column in columns.items()])
        return (
            more
            if schema is None
            else pa.unify_schemas([schema, more], promote_options="permissive")
        )


def schema_of_bytes(content: bytes) -> Any:
    return pa.ipc.read_schema(pa.py_buffer(content))


def check_writable(schema: Any, name: str) -> None:
    """Raise ConfigError if Parquet cannot hold the schema, such as an object without fields."""
    with _converting("--output"):
        ParquetOutput(BytesIO(), schema, name).close()


def table_of(rows: Sequence[Decoded], schema: Any, place: str) -> Any:
    """Return objects as a table; raise ConfigError if a value would not survive in its column."""
    with _converting(place):
        return pa.Table.from_pylist(list(rows), schema=schema)


class ParquetOutput:
    """A Parquet file of rows and their scores, in a column `name`."""

    def __init__(self, file: Any, schema: Any, name: str) -> None:
        self.schema, self._all = schema, schema.append(pa.field(name, SCORES_TYPE))
        self._writer = parquet.ParquetWriter(file, self._all)
        self._waiting: list[Any] = []

    def write(self, table: Any, scores: Iterable[list[float]]) -> None:
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
