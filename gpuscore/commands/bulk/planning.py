"""The first step of a job: read all rows, note the bad ones, sort the others."""

from collections.abc import Callable, Iterator
from typing import Any

from gpuscore.commands.bulk.calls import call_text
from gpuscore.commands.bulk.formats import read_blocks, table_schema
from gpuscore.commands.bulk.inputs import InputFiles
from gpuscore.commands.bulk.json_lines import JsonBlock
from gpuscore.commands.bulk.options import JSON_LINES, PARQUET, BatchOptions
from gpuscore.commands.bulk.rows import BadTextRow, Block, Problem, TextRow
from gpuscore.commands.bulk.sorting import MEMORY, RowSorter
from gpuscore.commands.bulk.store import ResultStore
from gpuscore.commands.bulk.work import SORTED, PlanState, WorkFolder
from gpuscore.errors import InvalidRequest

Advance = Callable[[int], None]


def make_plan(
    inputs: InputFiles,
    options: BatchOptions,
    work: WorkFolder,
    store: ResultStore,
    advance: Advance,
    memory: int = MEMORY,
) -> None:
    """Write sorted rows, bad rows and the number of all rows into the work folder.

    Args:
        advance: called with the number of rows read since the last call.
        memory: bytes of rows that are sorted in memory.

    Raises:
        ConfigError: the rows do not fit the output's format.
        InvalidRequest: a row is bad, and the job is strict.
    """
    sorter = RowSorter(work.path / SORTED, memory)
    check = _checker(inputs, options)
    number = 0
    for block in read_blocks(inputs, options, check.every_column):
        found = _texts(block, options)
        check.add(block, found)
        for index, texts in enumerate(found):
            if isinstance(texts, Problem):
                refuse_if_strict(options, block, index, texts.reason)
                store.put(BadTextRow(number, texts.reason))
            else:
                sorter.add(_row(texts, number))
            number += 1
        advance(block.count)
    schema = check.finish(read_blocks(inputs, options, every_column=True))
    files = sorter.finish()
    store.sync()
    work.write(PlanState(number, [path.name for path in files], schema))


def refuse_if_strict(options: BatchOptions, block: Block, index: int, reason: str) -> None:
    if options.strict:
        place = block.about(index)
        raise InvalidRequest(f"{place['file']}, row {place['row']}: {reason}")


def _texts(block: Block, options: BatchOptions) -> list[tuple[str, ...] | Problem]:
    if not isinstance(block, JsonBlock):
        return block.texts(options.columns)
    rows = block.decoded()
    if options.requests:
        return [call_text(*pair) for pair in zip(rows, block.raw, strict=True)]
    taken = Problem(f"there is a field {options.taken}")
    return [
        taken if isinstance(row, dict) and options.scores_column in row else texts
        for row, texts in zip(rows, block.texts(options.columns), strict=True)
    ]


def _row(texts: tuple[str, ...], number: int) -> TextRow:
    """Return a row to sort; its only text is the rest if there is no other one."""
    first, rest = ("", *texts)[-2:]
    return TextRow(first.encode(), rest.encode(), number)


class _NoChecks:
    """The checks of a format whose rows need none."""

    every_column = False

    def add(self, block: Any, texts: list[tuple[str, ...] | Problem]) -> None:
        """Check the rows of a block, of which the bad ones have no texts."""

    def finish(self, blocks: Iterator[Block]) -> bytes | None:
        """Make the checks that need all rows; return a schema that is known only then."""
        return None


class _Utf8(_NoChecks):
    """The check of Parquet's columns before they become JSON."""

    every_column = True

    def add(self, block: Any, texts: list[tuple[str, ...] | Problem]) -> None:
        from gpuscore.commands.bulk.parquet import check_utf8

        check_utf8(block)


class _Schema(_NoChecks):
    """The schema in Parquet of the objects of JSON lines."""

    def __init__(self, options: BatchOptions) -> None:
        from gpuscore.commands.bulk.parquet import SchemaFinder

        self._finder, self._options = SchemaFinder(options.columns), options

    def add(self, block: Any, texts: list[tuple[str, ...] | Problem]) -> None:
        self._finder.add(*_objects(block, texts))

    def finish(self, blocks: Iterator[Block]) -> bytes:
        from gpuscore.commands.bulk.parquet import check_writable, schema_bytes, try_table

        schema = self._finder.schema
        if self._finder.promoted:
            for block in blocks:
                rows, place = _objects(block, _texts(block, self._options))
                try_table(rows, schema, place)
        check_writable(schema, self._options.scores_column)
        return schema_bytes(schema)


def _objects(block: Any, texts: list[tuple[str, ...] | Problem]) -> tuple[list[Any], str]:
    """Return the objects of the good rows, and a description of their place."""
    pairs = zip(block.decoded(), texts, strict=True)
    rows = [row for row, text in pairs if not isinstance(text, Problem)]
    return rows, f"--input {block.path}, lines {block.places[0]} to {block.places[-1]}"


def _checker(inputs: InputFiles, options: BatchOptions) -> _NoChecks:
    kinds = inputs.format, options.output_format
    if kinds == (PARQUET, JSON_LINES):
        return _Utf8()
    return _Schema(options) if kinds == (JSON_LINES, PARQUET) else _NoChecks()


def output_schema(inputs: InputFiles, options: BatchOptions, plan: PlanState) -> Any:
    """Return the Arrow schema of the input's columns."""
    from gpuscore.commands.bulk.parquet import schema_of_bytes

    known = table_schema(inputs, options)
    return schema_of_bytes(plan.schema or b"") if known is None else known
