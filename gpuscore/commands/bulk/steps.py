"""The steps of a job that read the whole input: the first notes the bad rows and sorts the others,
the last one writes the output in the input's order."""

import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import msgspec

from gpuscore.commands.bulk.inputs import (
    InputFiles,
    LineBlock,
    read_blocks,
    sha256_of,
    table_schema,
)
from gpuscore.commands.bulk.options import JSON_LINES, PARQUET, SUFFIXES, BatchOptions
from gpuscore.commands.bulk.rows import BadTextRow, Block, Problem, TextRow
from gpuscore.commands.bulk.store import (
    ANSWERED,
    BAD,
    FAILED,
    MEMORY,
    SCORED,
    ResultStore,
    RowSorter,
)
from gpuscore.commands.bulk.tasks import call_text
from gpuscore.commands.bulk.work import (
    BAD_ROWS,
    OUTPUT,
    SORTED,
    PlanState,
    WorkFolder,
    WrittenState,
    sync_file,
    sync_folder,
)
from gpuscore.errors import ConfigError, InvalidRequest
from gpuscore.types.batch import Float64Array

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
    check, finish = _output_checks(inputs, options)
    number = 0
    # JSON lines have every column, so all must be UTF-8.
    for block in read_blocks(inputs, options, every_column=options.output_format == JSON_LINES):
        rows = _texts_of(block, options)
        check(block, rows)
        if options.strict:
            _refuse_bad(block, rows)
        for texts in rows:
            if isinstance(texts, Problem):
                store.put(BadTextRow(number, texts.reason))
            else:
                sorter.add(_text_row(texts, number))
            number += 1
        advance(block.count)
    schema = finish()
    files = sorter.finish()
    store.sync()
    work.write(PlanState(number, [path.name for path in files], schema))


def _texts_of(block: Block, options: BatchOptions) -> Texts:
    """Return the texts of every row of a block, or what is wrong with it."""
    if not isinstance(block, LineBlock):
        return block.texts(options.columns)
    rows = block.decoded()
    if options.requests:
        lines = cast(list[bytes], block.rows)  # requests are JSON lines
        return [call_text(*pair) for pair in zip(rows, lines, strict=True)]
    return [
        Problem(f"there is a field {options.taken}")
        if isinstance(row, dict) and options.scores_column in row
        else texts
        for row, texts in zip(rows, block.texts(options.columns), strict=True)
    ]


def _refuse_bad(block: Block, rows: Texts) -> None:
    """Raise InvalidRequest for the first bad row of a block."""
    for index, texts in enumerate(rows):
        if isinstance(texts, Problem):
            place = block.about(index)
            raise InvalidRequest(f"{place['file']}, row {place['row']}: {texts.reason}")


def _text_row(texts: tuple[str, ...], number: int) -> TextRow:
    """Return a row to sort; a single text is the row's `rest`."""
    first, rest = ("", *texts)[-2:]
    return TextRow(first.encode(), rest.encode(), number)


def _objects_of(block: Any, texts: Texts) -> tuple[list[Any], str]:
    """Return the objects of the good rows, and a description of their place."""
    pairs = zip(block.decoded(), texts, strict=True)
    rows = [row for row, text in pairs if not isinstance(text, Problem)]
    return rows, f"--input {block.path}, lines {block.places[0]} to {block.places[-1]}"


def _output_checks(
    inputs: InputFiles, options: BatchOptions
) -> tuple[Check, Callable[[], bytes | None]]:
    """Return the check of each block for the output's format, and the check after the last block,
    which returns the schema if it depends on all blocks."""
    kinds = inputs.format, options.output_format
    if kinds == (PARQUET, JSON_LINES):
        from gpuscore.commands.bulk.parquet import check_json

        return lambda block, texts: check_json(block), lambda: None
    if kinds != (JSON_LINES, PARQUET):
        return lambda block, texts: None, lambda: None
    from gpuscore.commands.bulk import parquet

    finder = parquet.SchemaFinder(options.columns)

    def finish() -> bytes:
        schema = finder.schema
        for block in read_blocks(inputs, options, every_column=True) if finder.promoted else ():
            parquet.try_table(*_objects_of(block, _texts_of(block, options)), schema)
        parquet.check_writable(schema, options.scores_column)
        return parquet.schema_bytes(schema)

    return lambda block, texts: finder.add(*_objects_of(block, texts)), finish


ANSWERS = (ANSWERED, FAILED)
BUFFER = 2**20
NO_ROWS = hashlib.sha256().hexdigest()  # of a file without rows


def write_output(
    inputs: InputFiles,
    options: BatchOptions,
    plan: PlanState,
    store: ResultStore,
    work: WorkFolder,
    advance: Callable[[int], None],
) -> None:
    """Write the output and the bad rows into the work folder, and note that both files are whole.

    Raises:
        ConfigError: the input has another number of rows than before.
    """
    start = failed = bad = 0
    with ExitStack() as stack:
        output = _open(stack, inputs, options, plan, store, work)
        bad_rows = stack.enter_context((work.path / BAD_ROWS).open("wb", BUFFER))
        for block in read_blocks(inputs, options, every_column=True):
            kinds, scores = store.scan(start, block.count)
            _refuse_missing(kinds, start, work)
            bad += _write_bad(bad_rows, store, block, start, kinds)
            failed += kinds.count(FAILED)
            output(block, start, kinds, scores)
            start += block.count
            advance(block.count)
    if start != plan.rows:
        raise ConfigError(
            f"--input {options.input} changed: it had {plan.rows} rows and has {start}"
        )
    for name in (OUTPUT, BAD_ROWS):
        sync_file(work.path / name)
    digests = sha256_of(work.path / OUTPUT), sha256_of(work.path / BAD_ROWS)
    work.write(WrittenState(start - bad, failed, bad, *digests))


def check_written(options: BatchOptions, work: WorkFolder) -> None:
    """Raise ConfigError unless the files that an earlier run has written are there."""
    written = work.need(WrittenState)
    rows = f"{written.scored} scored rows and {written.bad} bad ones"
    if not written.bad and written.bad_rows != NO_ROWS:
        raise work.damaged(f"{written.file} has {rows}, and {BAD_ROWS} was not empty")
    for new, path, digest, count in _files(options, work, written):
        place = new if new.exists() else path
        if not place.is_file() or sha256_of(place) != digest or _rows_of(path, place) != count:
            what = "is not the file that was written" if place.exists() else "is missing"
            raise work.damaged(f"{written.file} has {rows}, and {place} {what}")


def publish(options: BatchOptions, work: WorkFolder) -> WrittenState:
    """Give the files their names and remove the work folder; may be called again after a kill.

    Raises:
        ConfigError: a file of that name has appeared meanwhile.
    """
    written = work.need(WrittenState)
    files = [(new, path) for new, path, *_ in _files(options, work, written) if new.exists()]
    for _, path in files:
        refuse_existing(path)
    for new, path in files:
        new.rename(path)
    sync_folder(options.output.absolute().parent)
    work.remove()
    return written


def refuse_existing(path: Path) -> None:
    """Raise ConfigError if a file of the output's name, or a link, is there."""
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already; remove it or choose another --output")


def _files(
    options: BatchOptions, work: WorkFolder, written: WrittenState
) -> list[tuple[Path, Path, str, int]]:
    """Return the file of each part of the output, the name it gets, its SHA-256 and its rows."""
    output = (work.path / OUTPUT, options.output, written.output, written.scored)
    bad_rows = (work.path / BAD_ROWS, options.bad_rows, written.bad_rows, written.bad)
    return [bad_rows, output] if written.bad else [output]


def _rows_of(path: Path, place: Path) -> int:
    """Return the number of rows of a file at a place, whose format the suffix of `path` tells."""
    if SUFFIXES[path.suffix] == JSON_LINES:
        with place.open("rb") as file:
            return sum(1 for _ in file)
    from gpuscore.commands.bulk.parquet import count_rows

    return count_rows(place)


Write = Callable[[Block, int, list[int], Float64Array], None]


def _open(
    stack: ExitStack,
    inputs: InputFiles,
    options: BatchOptions,
    plan: PlanState,
    store: ResultStore,
    work: WorkFolder,
) -> Write:
    """Open the output; return a writer of blocks: number of the first row, kinds, scores."""
    path = work.path / OUTPUT
    if options.output_format == JSON_LINES:
        file = stack.enter_context(path.open("wb", BUFFER))

        def write_lines(block: Block, start: int, kinds: list[int], scores: Float64Array) -> None:
            if options.requests:
                lines = [store.text(start + i) for i, kind in enumerate(kinds) if kind in ANSWERS]
            else:
                keep = _scored(kinds)
                lines = block.lines(keep, scores[keep], options.scores_column)
            file.writelines(line + b"\n" for line in lines)

        return write_lines
    from gpuscore.commands.bulk.parquet import ParquetOutput

    table = ParquetOutput(path, table_schema(inputs, plan.schema), options.scores_column)
    stack.callback(table.close)

    def write_table(block: Block, start: int, kinds: list[int], scores: Float64Array) -> None:
        keep = _scored(kinds)
        if keep:
            table.write(block.table(keep, table.schema), scores[keep])

    return write_table


def _refuse_missing(kinds: list[int], start: int, work: WorkFolder) -> None:
    """Raise ConfigError if a row has no result; every row had one when scoring ended."""
    if 0 in kinds:
        raise work.damaged(f"row {start + kinds.index(0) + 1} of all has no result")


def _scored(kinds: list[int]) -> list[int]:
    """Return the numbers of a block's rows with scores."""
    return [index for index, kind in enumerate(kinds) if kind == SCORED]


def _write_bad(
    file: BinaryIO, store: ResultStore, block: Block, start: int, kinds: list[int]
) -> int:
    """Write the bad rows of a block; return their number."""
    bad = [index for index, kind in enumerate(kinds) if kind == BAD]
    for index in bad:
        about = {"reason": store.text(start + index).decode(), **block.about(index)}
        file.write(msgspec.json.encode(about) + b"\n")
    return len(bad)
