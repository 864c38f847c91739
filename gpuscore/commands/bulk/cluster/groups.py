"""Groups of rows. A row's group follows from the digest of its query, so that the rows of a query
are computed together; a query of more text than a group should have is divided. Rows travel from
the tasks that read them to the actors that score them in Arrow tables, of the input's columns or of
the rows of text files as they are."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import compute

from gpuscore.commands.bulk.cluster.storage import InputFile, located, on_disk
from gpuscore.commands.bulk.inputs import (
    Decoded,
    InputFiles,
    LineBlock,
    check_inputs,
    read_blocks,
    table_schema,
)
from gpuscore.commands.bulk.options import JSON_LINES, BatchOptions
from gpuscore.commands.bulk.parquet import SchemaFinder, TableBlock, schema_bytes
from gpuscore.commands.bulk.rows import Problem
from gpuscore.commands.bulk.steps import objects_of, output_checks, refuse_bad, texts_of
from gpuscore.errors import ConfigError

GROUP, NUMBER = "gpuscore.group", "gpuscore.number"  # of each row
LINE = "gpuscore.line"  # of text files: a row, and the line it begins on
FILE_ROWS = 2**40  # a row's number is its number in its file, plus this for each file before
LEAST_BYTES = 32 * 2**10  # of the input, for a group
BUCKETS = 2**20  # of queries, whose bytes are counted
SHOWN = 256  # bytes of a text without a query that decide its group


class Plan(msgspec.Struct, frozen=True):
    """The input, the settings by name and the number of groups, which all runs of a job have in
    common. The schema is of the input's columns; empty if JSON lines become JSON lines."""

    settings: dict[str, Any]
    files: list[InputFile]
    groups: int
    schema: bytes

    @property
    def names(self) -> list[str]:
        """The names of the groups' files."""
        return [f"part-{group:06d}" for group in range(self.groups)]


def columns_of(inputs: InputFiles, options: BatchOptions) -> bytes:
    """Check a file's columns; return their schema, or for JSON lines that become Parquet the schema
    of all rows. JSON lines that stay as they are have none."""
    check_inputs(inputs, options)
    if inputs.format != JSON_LINES:
        return schema_bytes(table_schema(inputs, None))
    if options.output_format == JSON_LINES:
        return b""
    finder = SchemaFinder(options.columns)
    for block in read_blocks(inputs, options, every_column=True):
        finder.add(*objects_of(block, texts_of(block, options)))
    return schema_bytes(finder.schema)


class Divider:
    """The choice of each row's group, for the rows of one file in their order."""

    def __init__(self, plan: Plan) -> None:
        average = sum(file.size for file in plan.files) // plan.groups
        self._groups, self._most = plan.groups, max(LEAST_BYTES, average // len(plan.files))
        self._bytes = np.zeros(BUCKETS, np.int64)

    def group(self, texts: tuple[str, ...] | Problem, number: int) -> int:
        if isinstance(texts, Problem):
            return number % self._groups
        first, rest = ("", *texts)[-2:]
        text = (first or rest[:SHOWN]).encode()
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
        group, bucket = divmod(key, BUCKETS)
        part = int(self._bytes[bucket]) // self._most
        self._bytes[bucket] += len(text) + len(rest)
        return (group + part) % self._groups


def read_rows(
    place: str, file: int, plan: Plan, options: BatchOptions, left: list[int]
) -> Iterator[pa.Table]:
    """Yield the rows of a file of the plan that are in the groups that are left.

    Raises ConfigError for a file that has changed, has other columns than the first one, or does
    not fit the output's format, and InvalidRequest for a bad row of a strict job.
    """
    file_info, number, divider = plan.files[file], file * FILE_ROWS, Divider(plan)
    with on_disk(located(place)[0], file_info) as path:
        inputs = InputFiles(file_info.format, (path,))
        if file_info.format != JSON_LINES and columns_of(inputs, options) != plan.schema:
            raise ConfigError(
                f"--input {file_info.path} has other columns than {plan.files[0].path}"
            )
        check, _ = output_checks(inputs, options, plan.schema)
        for block in read_blocks(inputs, options, every_column=True):
            rows = texts_of(block, options)
            check(block, rows)
            if options.strict:
                refuse_bad(block, rows)
            groups = np.array([divider.group(row, number + i) for i, row in enumerate(rows)])
            (keep,) = np.nonzero(np.isin(groups, left))
            table = _columns(block, keep).append_column(NUMBER, pa.array(keep + number))
            yield table.append_column(GROUP, pa.array(groups[keep]))
            number += block.count


def _columns(block: Any, keep: Any) -> pa.Table:
    if isinstance(block, TableBlock):
        return block.rows.take(keep)
    lines = (_encoded(block.rows[index], block.places[index]) for index in keep)
    return pa.table({LINE: pa.array(lines, pa.large_binary())})


def _encoded(row: bytes | Decoded, place: int) -> bytes:
    return msgspec.msgpack.encode((row.reason if isinstance(row, Problem) else row, place))


def _decoded(line: bytes) -> tuple[bytes | Decoded, int]:
    row, place = msgspec.msgpack.decode(line)
    return Problem(row) if isinstance(row, str) else row, place


class GroupRows:
    """The rows of one group, in the order of their numbers."""

    def __init__(self, table: pa.Table, plan: Plan) -> None:
        table = table.sort_by(NUMBER)
        self.numbers: list[int] = table.column(NUMBER).to_pylist()
        self._plan, self.block = plan, _block(table.drop_columns([GROUP, NUMBER]))

    def about(self, index: int) -> dict[str, Any]:
        """Return the place and the content of a row, as a job without Ray does."""
        file, row = divmod(self.numbers[index], FILE_ROWS)
        place = Path(Path(self._plan.files[file].path).name), row + 1
        block, part = self.block, slice(index, index + 1)
        if isinstance(block, TableBlock):
            return TableBlock(*place, block.rows[part]).about(0)
        return LineBlock(*place, block.rows[part], block.places[part]).about(0)


def _block(table: pa.Table) -> LineBlock | TableBlock:
    if LINE not in table.column_names:
        return TableBlock(Path(), 1, table)
    pairs = [_decoded(line) for line in table.column(LINE).to_pylist()]
    return LineBlock(Path(), 1, *map(list, zip(*pairs, strict=True)))


def groups_of(table: pa.Table, plan: Plan) -> Iterator[tuple[str, GroupRows]]:
    """Yield the groups of a table that has all rows of each of them, with their names."""
    for group in compute.unique(table.column(GROUP)).to_pylist():
        rows = table.filter(compute.equal(table.column(GROUP), group))
        yield plan.names[group], GroupRows(rows, plan)
