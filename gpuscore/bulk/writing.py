"""The last step of a job: the output, in the input's order."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from gpuscore.arrays import Float64Array
from gpuscore.bulk.formats import read_blocks
from gpuscore.bulk.inputs import InputFiles
from gpuscore.bulk.options import JSON_LINES, BatchOptions
from gpuscore.bulk.planning import output_schema
from gpuscore.bulk.rows import Block
from gpuscore.bulk.store import ANSWERED, BAD, FAILED, SCORED, ResultStore
from gpuscore.bulk.work import WRITTEN, WorkFolder, sync_file, sync_folder
from gpuscore.errors import ConfigError

OUTPUT, BAD_ROWS = "output.new", "bad.new"
ANSWERS = (ANSWERED, FAILED)
BUFFER = 2**20


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """Numbers of rows.

    Attributes:
        scored: rows of the output; for requests, those that were answered with an error included.
        failed: requests that were answered with an error.
        bad: rows in OUTPUT.bad.jsonl.
    """

    scored: int
    failed: int
    bad: int


def write_output(
    inputs: InputFiles,
    options: BatchOptions,
    rows: int,
    store: ResultStore,
    work: WorkFolder,
    advance: Callable[[int], None],
) -> None:
    """Write the output and the bad rows into the work folder, and note there that they are whole.

    Raises:
        ConfigError: the input has another number of rows than before.
    """
    start = failed = bad = 0
    with ExitStack() as stack:
        output = _open(stack, inputs, options, store, work)
        bad_rows = stack.enter_context((work.path / BAD_ROWS).open("wb", BUFFER))
        for block in read_blocks(inputs, options, every_column=True):
            kinds, scores = store.scan(start, block.count)
            _refuse_missing(kinds, start, work)
            bad += _write_bad(bad_rows, store, block, start, kinds)
            failed += kinds.count(FAILED)
            output(block, start, kinds, scores)
            start += block.count
            advance(block.count)
    if start != rows:
        raise ConfigError(f"--input {options.input} changed: it had {rows} rows and has {start}")
    for name in (OUTPUT, BAD_ROWS):
        sync_file(work.path / name)
    work.write(WRITTEN, {"scored": rows - bad, "failed": failed, "bad": bad})


def publish(options: BatchOptions, work: WorkFolder) -> BatchOutcome:
    """Give the files their names and remove the work folder; may be called again after a kill."""
    outcome = BatchOutcome(**work.need(WRITTEN))
    output, bad_rows = work.path / OUTPUT, work.path / BAD_ROWS
    if bad_rows.exists() and outcome.bad:
        bad_rows.rename(options.bad_rows)
    if output.exists():
        output.rename(options.output)
    sync_folder(options.output.absolute().parent)
    work.remove()
    return outcome


Write = Callable[[Block, int, list[int], Float64Array], None]


def _open(
    stack: ExitStack,
    inputs: InputFiles,
    options: BatchOptions,
    store: ResultStore,
    work: WorkFolder,
) -> Write:
    """Open the output; return what writes a block: its first row's number, kinds, scores."""
    path = work.path / OUTPUT
    if options.output_format == JSON_LINES:
        file = stack.enter_context(path.open("wb", BUFFER))

        def write_lines(block: Block, start: int, kinds: list[int], scores: Float64Array) -> None:
            if options.requests:
                lines = [store.text(start + i) for i, kind in enumerate(kinds) if kind in ANSWERS]
            else:
                keep = _scored(kinds)
                lines = block.lines(keep, scores[keep])
            file.writelines(line + b"\n" for line in lines)

        return write_lines
    from gpuscore.bulk.parquet import ParquetOutput

    table = ParquetOutput(path, output_schema(inputs, options, work))
    stack.callback(table.close)

    def write_table(block: Block, start: int, kinds: list[int], scores: Float64Array) -> None:
        keep = _scored(kinds)
        if keep:
            table.write(block.table(keep, table.schema), scores[keep])

    return write_table


def _refuse_missing(kinds: list[int], start: int, work: WorkFolder) -> None:
    """Raise ConfigError if a row has no result; every row had one when scoring ended."""
    if 0 in kinds:
        number = start + kinds.index(0) + 1
        raise ConfigError(
            f"row {number} of all has no result: {work.path} is damaged; remove it to begin anew"
        )


def _scored(kinds: list[int]) -> list[int]:
    """Return the numbers of a block's rows with scores."""
    return [index for index, kind in enumerate(kinds) if kind == SCORED]


def _write_bad(
    file: BinaryIO, store: ResultStore, block: Block, start: int, kinds: list[int]
) -> int:
    """Write the bad rows of a block; return their number."""
    found = [index for index, kind in enumerate(kinds) if kind == BAD]
    for index in found:
        about = {"reason": store.text(start + index).decode(), **block.about(index)}
        file.write(msgspec.json.encode(about) + b"\n")
    return len(found)
