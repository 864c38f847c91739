"""The output of a job: checks of its format before anything is scored, and how it appears."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from gpuscore.commands.bulk.inputs import InputFiles, read_header, sha256_of
from gpuscore.commands.bulk.options import CSV, JSON_LINES, PARQUET, BatchOptions
from gpuscore.commands.bulk.work import (
    BAD_ROWS,
    OUTPUT,
    Answer,
    JobState,
    WorkFolder,
    WrittenState,
    sync,
)
from gpuscore.errors import ConfigError

BUFFER = 2**20


def plan_output(inputs: InputFiles, options: BatchOptions) -> tuple[list[int], bytes | None]:
    """Return the number of rows of every block, and the schema if it depends on the rows.

    Raises:
        ConfigError: the output's format cannot hold the rows.
    """
    kinds, parts = (inputs.format, options.output_format), []
    for block in inputs.blocks():
        parts.append(block.count)
        if kinds == (PARQUET, JSON_LINES):
            block.check_json()
    return parts, _schema_of_rows(inputs, options) if kinds == (JSON_LINES, PARQUET) else None


def _schema_of_rows(inputs: InputFiles, options: BatchOptions) -> bytes:
    """Return the schema of all good rows of JSON lines."""
    from gpuscore.commands.bulk import parquet

    def good(block: Any) -> list[int]:
        texts = block.texts(options)
        return [index for index, text in enumerate(texts) if not isinstance(text, str)]

    schema = parquet.schema_of_texts([])
    for block in inputs.blocks():
        rows = block.decoded()
        schema = parquet.widened(schema, [rows[index] for index in good(block)], block.place)
    schema = schema if len(schema) else parquet.schema_of_texts(options.columns)
    for block in inputs.blocks():
        block.table(good(block), schema)  # a value might not survive in its column
    parquet.check_writable(schema, options.scores_column)
    return bytes(schema.serialize())


def write_output(
    inputs: InputFiles, options: BatchOptions, state: JobState, work: WorkFolder
) -> WrittenState:
    """Write the output and the bad rows into the work folder; note that both files are whole."""
    failed = bad = 0
    with ExitStack() as stack:
        write = _open(stack, inputs, options, state, work)
        bad_rows = stack.enter_context((work.path / BAD_ROWS).open("wb", BUFFER))
        for number, block in enumerate(inputs.blocks()):
            results = work.results(number, block.count)
            if None in results:
                raise work.damaged(f"a row of {number}.part has no result")
            keep = []
            for index, result in enumerate(results):
                if isinstance(result, str):
                    about = {"reason": result, **block.about(index)}
                    bad_rows.write(msgspec.json.encode(about) + b"\n")
                else:
                    keep.append(index)
                    failed += isinstance(result, Answer) and result.failed
            bad += block.count - len(keep)
            if keep:
                write(block, keep, [results[index] for index in keep])
    for name in (OUTPUT, BAD_ROWS):
        sync(work.path / name)
    digests = sha256_of(work.path / OUTPUT), sha256_of(work.path / BAD_ROWS)
    written = WrittenState(sum(state.parts) - bad, failed, bad, *digests)
    work.write(written)
    return written


def _open(
    stack: ExitStack,
    inputs: InputFiles,
    options: BatchOptions,
    state: JobState,
    work: WorkFolder,
) -> Callable[[Any, Sequence[int], Sequence[Any]], None]:
    """Open the output; return a writer of a block: the numbers of its rows, and their results."""
    path, name = work.path / OUTPUT, options.scores_column
    if options.output_format == PARQUET:
        from gpuscore.commands.bulk import parquet

        if inputs.format == PARQUET:
            schema = parquet.read_schema(inputs.paths[0])
        elif inputs.format == CSV:
            schema = parquet.schema_of_texts(read_header(inputs.paths[0]))
        else:
            schema = parquet.schema_of_bytes(state.schema or b"")
        output = parquet.ParquetOutput(path, schema, name)
        stack.callback(output.close)
        return lambda block, keep, scores: output.write(block.table(keep, schema), scores)
    file, added = stack.enter_context(path.open("wb", BUFFER)), msgspec.json.encode(name)

    def write(block: Any, keep: Sequence[int], results: Sequence[Any]) -> None:
        if options.requests:
            file.writelines(answer.line + b"\n" for answer in results)
            return
        for line, scores in zip(block.lines(keep), results, strict=True):
            values = msgspec.json.encode(scores)
            file.write(b"%b,%b:%b}\n" % (line[:-1].rstrip(), added, values))

    return write


def publish(options: BatchOptions, work: WorkFolder, written: WrittenState) -> None:
    """Give the files their names and remove the work folder; may be called again after a kill.

    Raises:
        ConfigError: a file of that name has appeared meanwhile, or is not the one that was written.
    """
    files = [(BAD_ROWS, options.bad_rows, written.bad_rows)] if written.bad else []
    files.append((OUTPUT, options.output, written.output))
    for name, path, digest in files:
        place = work.path / name
        if place.exists():
            refuse_existing(path)
        else:
            place = path  # an earlier run has renamed it
        if not place.is_file() or sha256_of(place) != digest:
            raise work.damaged(f"{written.file} tells of another {place}")
    for name, path, _ in files:
        if (work.path / name).exists():
            (work.path / name).rename(path)
    sync(options.output.absolute().parent)
    work.remove()


def refuse_existing(path: Any) -> None:
    """Raise ConfigError if a file of the output's name, or a link, is there."""
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already; remove it or choose another --output")
