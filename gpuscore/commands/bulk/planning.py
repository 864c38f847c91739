"""The first step of a job: read all rows, note the bad ones, sort the others."""

from collections.abc import Callable
from typing import Any, TypeAlias, cast

from gpuscore.commands.bulk.calls import call_text
from gpuscore.commands.bulk.inputs import InputFiles, read_blocks
from gpuscore.commands.bulk.line_rows import LineBlock
from gpuscore.commands.bulk.options import JSON_LINES, PARQUET, BatchOptions
from gpuscore.commands.bulk.rows import BadTextRow, Block, Problem, TextRow
from gpuscore.commands.bulk.sorting import MEMORY, RowSorter
from gpuscore.commands.bulk.store import ResultStore
from gpuscore.commands.bulk.work import SORTED, PlanState, WorkFolder
from gpuscore.errors import InvalidRequest

Advance: TypeAlias = Callable[[int], None]
Texts: TypeAlias = list[tuple[str, ...] | Problem]
Check: TypeAlias = Callable[[Any, Texts], None]  # of a block, whose bad rows have no texts


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
    check, finish = _checks(inputs, options)
    number = 0
    # JSON lines have every column, so all must be UTF-8.
    for block in read_blocks(inputs, options, every_column=options.output_format == JSON_LINES):
        found = _texts(block, options)
        check(block, found)
        for index, texts in enumerate(found):
            if isinstance(texts, Problem):
                refuse_if_strict(options, block, index, texts.reason)
                store.put(BadTextRow(number, texts.reason))
            else:
                sorter.add(_row(texts, number))
            number += 1
        advance(block.count)
    schema = finish()
    files = sorter.finish()
    store.sync()
    work.write(PlanState(number, [path.name for path in files], schema))


def refuse_if_strict(options: BatchOptions, block: Block, index: int, reason: str) -> None:
    if options.strict:
        place = block.about(index)
        raise InvalidRequest(f"{place['file']}, row {place['row']}: {reason}")


def _texts(block: Block, options: BatchOptions) -> Texts:
    if not isinstance(block, LineBlock):
        return block.texts(options.columns)
    rows = block.decoded()
    if options.requests:
        lines = cast(list[bytes], block.rows)  # requests are JSON lines
        return [call_text(*pair) for pair in zip(rows, lines, strict=True)]
    taken = Problem(f"there is a field {options.taken}")
    return [
        taken if isinstance(row, dict) and options.scores_column in row else texts
        for row, texts in zip(rows, block.texts(options.columns), strict=True)
    ]


def _row(texts: tuple[str, ...], number: int) -> TextRow:
    """Return a row to sort; its only text is the rest if there is no other one."""
    first, rest = ("", *texts)[-2:]
    return TextRow(first.encode(), rest.encode(), number)


def _objects(block: Any, texts: Texts) -> tuple[list[Any], str]:
    """Return the objects of the good rows, and a description of their place."""
    pairs = zip(block.decoded(), texts, strict=True)
    rows = [row for row, text in pairs if not isinstance(text, Problem)]
    return rows, f"--input {block.path}, lines {block.places[0]} to {block.places[-1]}"


def _checks(inputs: InputFiles, options: BatchOptions) -> tuple[Check, Callable[[], bytes | None]]:
    """Return the check of each block for the output's format, and the check after all of them,
    which returns the schema if only then it is known."""
    kinds = inputs.format, options.output_format
    if kinds == (PARQUET, JSON_LINES):
        from gpuscore.commands.bulk.parquet import check_utf8

        return lambda block, texts: check_utf8(block), lambda: None
    if kinds != (JSON_LINES, PARQUET):
        return lambda block, texts: None, lambda: None
    from gpuscore.commands.bulk.parquet import SchemaFinder, check_writable, schema_bytes, try_table

    finder = SchemaFinder(options.columns)

    def finish() -> bytes:
        schema = finder.schema
        for block in read_blocks(inputs, options, every_column=True) if finder.promoted else ():
            try_table(*_objects(block, _texts(block, options)), schema)
        check_writable(schema, options.scores_column)
        return schema_bytes(schema)

    return lambda block, texts: finder.add(*_objects(block, texts)), finish
