"""The output of a job: rows with their results, written beside it and renamed."""

import filecmp
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from gpuscore.commands.bulk.inputs import Block, InputFiles
from gpuscore.commands.bulk.options import PARQUET, BatchOptions
from gpuscore.commands.bulk.work import BAD_ROWS, OUTPUT, Answer, WorkFolder, sync
from gpuscore.errors import ConfigError


class LinesOutput:
    """A file of JSON lines: answers, or the input's lines with scores in a field `name`."""

    def __init__(self, path: Path, name: str) -> None:
        self._file, self._name = path.open("wb"), msgspec.json.encode(name)
        self.close = self._file.close

    def write(self, block: Block, keep: Sequence[int], results: Sequence[Any]) -> None:
        """Add the rows with these numbers and their results."""
        for index, result in zip(keep, results, strict=True):
            line: Any = block.rows[index]
            if isinstance(result, Answer):
                self._file.write(result.line + b"\n")
            else:
                values = msgspec.json.encode(result)
                self._file.write(b"%b,%b:%b}\n" % (line[:-1].rstrip(), self._name, values))


def write_output(inputs: InputFiles, options: BatchOptions, work: WorkFolder) -> tuple[int, int]:
    """Write the output and the bad rows into the work folder; return the numbers of bad rows, and
    of requests that were answered with an error."""
    bad = failed = 0
    with (
        (work.path / BAD_ROWS).open("wb") as bad_rows,
        closing(_opened(inputs, options, work)) as output,
    ):
        for number, block in enumerate(inputs.blocks()):
            results = work.results(number, len(block.rows))
            for index, result in enumerate(results):
                if result is None:
                    raise work.damaged(f"a row of {number}.part has no result")
                if isinstance(result, str):
                    about = {"reason": result, **block.about(index)}
                    bad_rows.write(msgspec.json.encode(about) + b"\n")
                    bad += 1
                failed += isinstance(result, Answer) and result.failed
            keep = [index for index, result in enumerate(results) if not isinstance(result, str)]
            output.write(block, keep, [results[index] for index in keep])
    for name in (OUTPUT, BAD_ROWS):
        sync(work.path / name)
    return bad, failed


def _opened(inputs: InputFiles, options: BatchOptions, work: WorkFolder) -> Any:
    path, name = work.path / OUTPUT, options.scores_column
    if inputs.format != PARQUET:
        return LinesOutput(path, name)
    from gpuscore.commands.bulk.parquet import ParquetOutput

    return ParquetOutput(path, inputs.paths[0], name)


def publish(options: BatchOptions, work: WorkFolder, any_bad: bool) -> None:
    """Give the files their names and remove the work folder.

    Raises:
        ConfigError: another file of that name has appeared meanwhile.
    """
    files = {work.path / BAD_ROWS: options.bad_rows} if any_bad else {}
    files[work.path / OUTPUT] = options.target
    for new, path in files.items():
        refuse_existing(path, new)
    for new, path in files.items():
        new.rename(path)
    sync(options.target.absolute().parent)
    work.remove()


def refuse_existing(path: Path, new: Path | None = None) -> None:
    """Raise ConfigError if a file of the output's name, or a link, is there, unless it is as the
    new one: an earlier run has renamed it."""
    if not os.path.lexists(path):
        return
    if new is None or path.is_symlink() or not filecmp.cmp(path, new, shallow=False):
        raise ConfigError(f"{path} exists already; remove it or choose another --output")
