"""The folder OUTPUT.work: its lock, the settings and results that a job keeps there, and the output
that they become.

Every file is written beside its place and renamed, so it is there whole or not at all, even after a
kill or a loss of power.
"""

import fcntl
import filecmp
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from gpuscore.commands.bulk.inputs import Block, InputFiles
from gpuscore.commands.bulk.options import PARQUET, BatchOptions
from gpuscore.errors import ConfigError

JOB, DONE = "job.state", "done.state"  # a job's settings; their name once the output is there
OUTPUT, BAD_ROWS = "output.new", "bad.new"
_FILES = re.compile(r"(job|done)\.state|job\.state\.new|[0-9]+\.part(\.new)?|(output|bad)\.new")
_DIGEST = hashlib.sha256().digest_size


class Answer(msgspec.Struct, frozen=True):
    """The answer to a line of a file of requests: JSON without a line end."""

    line: bytes
    failed: bool


# A row's scores, the reason why it is bad, or its answer; None: it has no result yet.
Result: TypeAlias = list[float] | str | Answer | None
# Rows of a block, by their numbers, with their results.
Kept: TypeAlias = tuple[Block, list[int], list[Any]]
T = TypeVar("T")


class WorkFolder:
    """The folder of a job, whose lock this process holds."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def settings(self, name: str = JOB) -> dict[str, Any] | None:
        """Return the settings of a job, or None; raise ConfigError if they are damaged."""
        state = self._load(name, dict[str, Any])
        if state is None and (self.path / name).exists():
            raise self.damaged(f"{name} is not as it was written")
        return state

    def damaged(self, what: str) -> ConfigError:
        """Return the error that says which file of the folder is not as a run has left it."""
        return ConfigError(f"{self.path} is damaged: {what}; remove it to begin anew")

    def results(self, part: int, count: int) -> list[Result]:
        """Return the results of a part of so many rows; none if its file is missing or damaged."""
        results = self._load(f"{part}.part", list[Result])
        return results if results is not None and len(results) == count else [None] * count

    def _load(self, name: str, kind: type[T]) -> T | None:
        try:
            content = (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        digest, content = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(content).digest() != digest:
            return None
        try:
            return msgspec.msgpack.decode(content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def save(self, name: str, value: dict[str, Any] | list[Result]) -> None:
        """Write a file over the one that is there."""
        content = msgspec.msgpack.encode(value)
        new = self.path / f"{name}.new"
        new.write_bytes(hashlib.sha256(content).digest() + content)
        sync(new)
        new.rename(self.path / name)
        sync(self.path)

    def clear(self) -> None:
        """Remove the job's files, the state last: without it they look like those of others."""
        if (self.path / JOB).exists():
            (self.path / JOB).rename(self.path / DONE)
            sync(self.path)
        for name in sorted(os.listdir(self.path), key=lambda name: name == DONE):
            if _FILES.fullmatch(name):
                (self.path / name).unlink()

    def remove(self) -> None:
        """Remove the job's files and, unless somebody else has put a file into it, the folder."""
        self.clear()
        with suppress(OSError):
            self.path.rmdir()


@contextmanager
def locked(output: Path) -> Iterator[WorkFolder]:
    """Make and lock the work folder of an output; the kernel drops the lock of a dead process.

    Raises:
        ConfigError: another process holds the folder, it has files that are no job's, or it cannot
            be made.
    """
    work = WorkFolder(output.with_name(f"{output.name}.work"))
    try:
        work.path.mkdir(exist_ok=True)
        lock = os.open(work.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"--output {output}: {work.path}: {error.strerror}") from error
    try:
        if not _lock(lock, work.path):
            raise ConfigError(f"--output {output}: another run is writing it")
        if other := _foreign(work.path):
            what = f"{work.path} holds {other}, which belongs to no job"
            raise ConfigError(f"--output {output}: {what}; move it away or choose another --output")
        try:
            if (
                work.settings(DONE) is not None
            ):  # an earlier run was killed after all was done but this
                work.clear()
            yield work
        except BaseException:
            if not any((work.path / name).exists() for name in (JOB, DONE)):
                work.remove()  # there is no job yet
            raise
    finally:
        os.close(lock)


def _lock(lock: int, folder: Path) -> bool:
    """Lock a folder; return False if another run has it, or has just removed it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), folder.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _foreign(folder: Path) -> str | None:
    """Return the name of a file that is not a job's, if there is one; a link never is."""
    with os.scandir(folder) as listed:
        entries = {entry.name: entry.is_file(follow_symlinks=False) for entry in listed}
    there = JOB in entries or DONE in entries
    return next(
        (
            name
            for name, is_file in sorted(entries.items())
            if not is_file or not (_FILES.fullmatch(name) if there else name == f"{JOB}.new")
        ),
        None,
    )


def sync(path: Path) -> None:
    """Have a file or a folder written to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_output(inputs: InputFiles, options: BatchOptions, work: WorkFolder) -> tuple[int, int]:
    """Write the output and the bad rows into the work folder; return the numbers of bad rows, and
    of requests that were answered with an error."""
    bad = failed = 0

    def good() -> Iterator[Kept]:
        nonlocal bad, failed
        for number, block in enumerate(inputs.blocks()):
            results = work.results(number, len(block.rows))
            if None in results:
                raise work.damaged(f"a row of {number}.part has no result")
            keep = [index for index, result in enumerate(results) if not isinstance(result, str)]
            for index in sorted({*range(len(results))} - {*keep}):
                about = {"reason": results[index], **block.about(index)}
                bad_rows.write(msgspec.json.encode(about) + b"\n")
            bad += len(results) - len(keep)
            failed += sum(isinstance(result, Answer) and result.failed for result in results)
            yield block, keep, [results[index] for index in keep]

    with (work.path / BAD_ROWS).open("wb") as bad_rows:
        if inputs.format == PARQUET:
            from gpuscore.commands.bulk.parquet import write_parquet

            write_parquet(work.path / OUTPUT, inputs.paths[0], options.scores_column, good())
        else:
            _write_lines(work.path / OUTPUT, options.scores_column, good())
    for name in (OUTPUT, BAD_ROWS):
        sync(work.path / name)
    return bad, failed


def _write_lines(path: Path, name: str, good: Iterable[Kept]) -> None:
    """Write answers, or the input's lines with scores in a field `name`."""
    with path.open("wb") as file:
        for block, keep, results in good:
            for index, result in zip(keep, results, strict=True):
                line: Any = block.rows[index]
                if isinstance(result, Answer):
                    file.write(result.line + b"\n")
                else:
                    added = msgspec.json.encode({name: result})[1:]
                    file.write(line[:-1].rstrip() + b"," + added + b"\n")


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
