"""Parquet, and the conversion of other formats into it. The only module that needs pyarrow."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import compute, parquet

from gpuscore.commands.bulk.rows import Problem
from gpuscore.errors import ConfigError
from gpuscore.types.batch import Float64Array

BLOCK_ROWS = 4096
GROUP_ROWS, GROUP_BYTES = 2**17, 64 * 2**20  # of a row group that is written
SCORES_TYPE = pa.list_(pa.float64())
REMEDY = "write JSON lines instead, which keep every row as it is"


@dataclass(frozen=True, slots=True)
class TableBlock:
    """Rows of a file; `first` is the number of the first row, from 1."""

    path: Path
    first: int
    rows: Any  # pa.Table

    @property
    def count(self) -> int:
        return len(self.rows)

    def texts(self, columns: Sequence[str]) -> list[tuple[str, ...] | Problem]:
        texts = [_column_texts(self.rows.column(name), name) for name in columns]
        return [_all_texts(row) for row in zip(*texts, strict=True)]

    def lines(self, keep: Sequence[int], scores: Float64Array, name: str) -> list[bytes]:
        rows = _for_json(self.rows.take(np.asarray(keep, np.int64))).to_pylist()
        pairs = zip(rows, scores.tolist(), strict=True)
        return [msgspec.json.encode({**row, name: values}) for row, values in pairs]

    def table(self, keep: Sequence[int], schema: Any) -> Any:
        if len(keep) == self.count:
            return self.rows
        return self.rows.take(np.asarray(keep, np.int64))

    def about(self, index: int) -> dict[str, Any]:
        place = {"file": self.path.name, "row": self.first + index}
        try:
            (row,) = _for_json(self.rows.slice(index, 1)).to_pylist()
        except UnicodeDecodeError:
            return place
        return {**place, "input": row}


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> Iterator[TableBlock]:
    """Yield a file's rows; `columns` names the columns to read, None all of them."""
    with _reading(path), parquet.ParquetFile(path, pre_buffer=False) as file:
        first = 1
        for batch in file.iter_batches(BLOCK_ROWS, columns=columns):
            if len(batch):
                yield TableBlock(path, first, pa.Table.from_batches([batch]))
                first += len(batch)


def read_schema(path: Path) -> Any:
    """Return a file's schema with its metadata."""
    with _reading(path), parquet.ParquetFile(path) as file:
        return file.schema_arrow


def count_rows(path: Path) -> int:
    with _reading(path), parquet.ParquetFile(path) as file:
        return int(file.metadata.num_rows)


def check_columns(path: Path, schema: Any, columns: Sequence[str]) -> None:
    """Raise ConfigError if a column is there twice, or is not text."""
    for name in columns:
        if schema.names.count(name) > 1:
            raise ConfigError(f"--input {path} has the column {name} twice")
        kind = schema.field(name).type
        value = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not _is_text(value):
            raise ConfigError(f"--input {path}: column {name} is {kind}, not text")


def check_json(block: TableBlock) -> None:
    """Raise ConfigError for values that JSON lines cannot hold: text that is not UTF-8, NaN and
    infinity."""
    try:
        block.rows.validate(full=True)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"--input {block.path}: {error}; write Parquet instead") from error
    for name, column in zip(block.rows.column_names, block.rows.columns, strict=True):
        if not all(map(_is_finite, column.chunks)):
            what = f"column {name} has NaN or infinity, which JSON cannot hold"
            raise ConfigError(f"--input {block.path}: {what}; write Parquet instead")


def schema_of_texts(names: Sequence[str]) -> Any:
    """Return the schema of columns that are all text."""
    return pa.schema([(name, pa.string()) for name in names])


class SchemaFinder:
    """The schema of all objects that were added. A field with integers and floats becomes float, a
    field with null and another type gets that type; all other types must agree.

    Args:
        names: of the texts.

    Attributes:
        promoted: True if some objects have another type than the final type, so that `table_of`
            must be tried on all objects to know whether their values survive.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._schema = pa.schema([])
        self.promoted = False

    @property
    def schema(self) -> Any:
        """The schema; only the columns of texts if no object was added."""
        return self._schema if len(self._schema) else schema_of_texts(self._names)

    def add(self, rows: Sequence[dict[str, Any]], place: str) -> None:
        """Add objects; raise ConfigError, with `place`, for one without a type in Parquet."""
        names = list(dict.fromkeys(name for row in rows for name in row))
        with _converting(place):
            arrays = [pa.array([row.get(name) for row in rows]) for name in names]
        schema = pa.schema([(n, array.type) for n, array in zip(names, arrays, strict=True)])
        together = _unified([self._schema, schema], place)
        for part in (self._schema, schema):
            for field in part:
                final = together.field(field.name).type
                self.promoted |= field.type != final and not pa.types.is_null(field.type)
        self._schema = together


def _unified(schemas: Sequence[Any], place: str) -> Any:
    """Return one schema for the rows of several; raise ConfigError, with `place`, if none does."""
    with _converting(place):
        return pa.unify_schemas(schemas, promote_options="permissive")


def check_writable(schema: Any, name: str) -> None:
    """Raise ConfigError if Parquet cannot hold the schema, such as an object without fields."""
    with _converting("--output"):
        parquet.write_table(with_scores(schema, name).empty_table(), BytesIO())


def table_of(rows: Sequence[Any], schema: Any) -> Any:
    """Return objects as a table; a field that an object lacks is null."""
    return pa.Table.from_pylist(list(rows), schema=schema)


def try_table(rows: Sequence[dict[str, Any]], place: str, schema: Any) -> None:
    """Raise ConfigError if a value would not survive in its column."""
    with _converting(place):
        table_of(rows, schema)


def schema_bytes(schema: Any) -> bytes:
    return bytes(schema.serialize())


def schema_of_bytes(content: bytes) -> Any:
    return pa.ipc.read_schema(pa.py_buffer(content))


def with_scores(schema: Any, name: str) -> Any:
    return schema.append(pa.field(name, SCORES_TYPE))


class ParquetOutput:
    """A Parquet file of rows and their scores, in a column `name`, written in row groups of bounded
    size."""

    def __init__(self, path: Path, schema: Any, name: str) -> None:
        self.schema, self._with_scores = schema, with_scores(schema, name)
        self._writer = parquet.ParquetWriter(path, self._with_scores)
        self._waiting: list[Any] = []
        self._rows = self._bytes = 0

    def write(self, table: Any, scores: Float64Array) -> None:
        """Add rows with their scores [rows, labels]."""
        count, width = scores.shape
        ends = pa.array(np.arange(count + 1, dtype=np.int32) * width)
        column = pa.ListArray.from_arrays(ends, pa.array(scores.reshape(-1)))
        columns = [*table.columns, pa.chunked_array([column.cast(SCORES_TYPE)])]
        self._waiting.append(pa.Table.from_arrays(columns, schema=self._with_scores))
        self._rows, self._bytes = self._rows + count, self._bytes + table.nbytes
        if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting), self._rows)
        self._waiting, self._rows, self._bytes = [], 0, 0


def _column_texts(column: Any, name: str) -> list[str | Problem]:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    # As bytes: one text that is not UTF-8 must not spoil the others.
    return [_text(value, name) for value in column.cast(pa.large_binary()).to_pylist()]


def _text(value: bytes | None, name: str) -> str | Problem:
    if value is None:
        return Problem(f"{name} is null, not text")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return Problem(f"{name} is not UTF-8: {error.reason}")


def _is_finite(array: Any) -> bool:
    """Return True unless a number of the array is NaN or infinity, however deep it is nested."""
    types, kind = pa.types, array.type
    if types.is_floating(kind):
        # Arrow has no test of halves.
        values = array.cast(pa.float32()) if types.is_float16(kind) else array
        return bool(compute.all(compute.is_finite(values), min_count=0).as_py())
    if types.is_dictionary(kind):
        return _is_finite(array.dictionary)
    if types.is_map(kind):
        return _is_finite(array.keys) and _is_finite(array.items)
    if types.is_struct(kind):
        return all(map(_is_finite, array.flatten()))
    return _is_finite(array.flatten()) if hasattr(array, "flatten") else True


def _all_texts(row: tuple[str | Problem, ...]) -> tuple[str, ...] | Problem:
    texts = []
    for text in row:
        if isinstance(text, Problem):
            return text
        texts.append(text)
    return tuple(texts)


def _is_text(kind: Any) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _for_json(table: Any) -> Any:
    """Return a table that Python's types can hold: nanoseconds become text."""
    fields = [field.with_type(_json_type(field.type)) for field in table.schema]
    target = pa.schema(fields)
    return table if target.equals(table.schema) else table.cast(target)


def _json_type(kind: Any) -> Any:
    types = pa.types
    if types.is_temporal(kind) and str(getattr(kind, "unit", "")) == "ns":
        return pa.string()
    if types.is_list(kind) or types.is_large_list(kind):
        make = pa.list_ if types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_json_type(kind.value_type)))
    if types.is_struct(kind):
        return pa.struct([field.with_type(_json_type(field.type)) for field in kind])
    return kind


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
