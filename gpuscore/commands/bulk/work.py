"""The folder OUTPUT.work: its lock, the settings and results that a job keeps there, and the output
that they become.

Every file is written beside its place and renamed, so it is there whole or not at all, even after a
kill or a loss of power.
"""

import fcntl
import filecmp
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from gpuscore.commands.bulk.inputs import Block, Input
from gpuscore.commands.bulk.options import PARQUET, BatchOptions
from gpuscore.config.options import plain
from gpuscore.errors import ConfigError

JOB = "job.state"  # a job's settings; empty once the output is there
OUTPUT, BAD_ROWS = "output.new", "bad.new"
_FILES = re.compile(r"job\.state(\.new)?|[0-9]+\.part(\.new)?|(output|bad)\.new")


# A row's scores, the reason why it is bad, or the answer to a line of a file of requests: JSON
# without a line end. None: it has no result yet.
Result: TypeAlias = list[float] | str | bytes | None
ANSWERED = b'"response":{"status_code":200,'  # in an answer without an error, and in no other


class WorkFolder:
    """The folder of a job, whose lock this process holds."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def settings(self) -> dict[str, Any] | None:
        """Return the settings of a job, or None; raise ConfigError if they are damaged."""
        state: dict[str, Any] | None = self._load(JOB, dict[str, Any])
        if state is None and (self.path / JOB).exists():
            raise self.damaged(f"{JOB} is not as it was written")
        return state

    def refuse_changed(self, first: dict[str, Any], known: dict[str, Any]) -> None:
        """Raise ConfigError if a setting or the input is not what it was when the job began."""
        for name, now in known.items():
            if (was := first.get(name)) != now:
                changed = f"{name} was {plain(was)} when this job began and is {plain(now)}"
                raise ConfigError(f"{changed}; remove {self.path} to begin anew")

    def damaged(self, what: str) -> ConfigError:
        """Return the error that says which file of the folder is not as a run has left it."""
        return ConfigError(f"{self.path} is damaged: {what}; remove it to begin anew")

    def results(self, part: int, count: int) -> list[Result]:
        """Return the results of a part of so many rows; none if its file is missing or damaged."""
        results: list[Result] | None = self._load(f"{part}.part", list)
        return results if results is not None and len(results) == count else [None] * count

    def _load(self, name: str, kind: Any) -> Any:
        with suppress(FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return msgspec.msgpack.decode((self.path / name).read_bytes(), type=kind)
        return None

    def save(self, name: str, value: dict[str, Any] | list[Result]) -> None:
        """Write a file over the one that is there."""
        new = self.path / f"{name}.new"
        new.write_bytes(msgspec.msgpack.encode(value))
        sync(new)
        new.rename(self.path / name)
        sync(self.path)

    def clear(self) -> None:
        """Remove the job's files, the state last: without it they look like those of others."""
        if (self.path / JOB).exists():
            self.save(JOB, {})
        for name in sorted(os.listdir(self.path), key=lambda name: name == JOB):
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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(os.fstat(lock), work.path.stat())  # else just removed
        except (BlockingIOError, FileNotFoundError):
            held = False
        if not held:
            raise ConfigError(f"--output {output}: another run is writing it")
        if other := _foreign(work.path):
            what = f"{work.path} holds {other}, which belongs to no job"
            raise ConfigError(f"--output {output}: {what}; move it away or choose another --output")
        try:
            if work.settings() == {}:  # an earlier run was killed after all but this
                work.clear()
            yield work
        except BaseException:
            if not (work.path / JOB).exists():  # there is no job yet
                work.remove()
            raise
    finally:
        os.close(lock)


def _foreign(folder: Path) -> str | None:
    """Return the name of a file that is not a job's, if there is one; a link never is."""
    with os.scandir(folder) as listed:
        files = {entry.name: entry.is_file(follow_symlinks=False) for entry in listed}
    ours = {name for name in files if JOB in files and _FILES.fullmatch(name)} | {f"{JOB}.new"}
    return min((name for name in files if name not in ours or not files[name]), default=None)


def sync(path: Path) -> None:
    """Have a file or a folder written to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_output(source: Input, options: BatchOptions, work: WorkFolder) -> tuple[int, int]:
    """Write the output and the bad rows into the work folder; return the numbers of bad rows, and
    of requests that were answered with an error."""
    bad = failed = 0
    added = options.scores_column

    def good() -> Iterator[tuple[Block, list[int], list[Any]]]:
        """Yield blocks, with the places of their rows that are not bad, and their results."""
        nonlocal bad, failed
        for number, block in enumerate(source.blocks()):
            results, keep = work.results(number, len(block.rows)), []
            for index, result in enumerate(results):
                if result is None:
                    raise work.damaged(f"a row of {number}.part has no result")
                if isinstance(result, str):
                    bad_rows.write(msgspec.json.encode(block.about(index, result)) + b"\n")
                    bad += 1
                else:
                    keep.append(index)
                    failed += isinstance(result, bytes) and ANSWERED not in result
            yield block, keep, [results[index] for index in keep]

    with (work.path / BAD_ROWS).open("wb") as bad_rows:
        if source.format == PARQUET:
            from gpuscore.commands.bulk.parquet import write_parquet

            write_parquet(work.path / OUTPUT, source.path, added, good())
        else:
            with (work.path / OUTPUT).open("wb") as file:
                for block, keep, results in good():
                    for index, result in zip(keep, results, strict=True):
                        file.write(_line(block.rows[index], added, result) + b"\n")
    for name in (OUTPUT, BAD_ROWS):
        sync(work.path / name)
    return bad, failed


def _line(row: Any, name: str, result: Any) -> bytes:
    """Return an answer, or the input's line with scores in a field `name`."""
    if not isinstance(result, bytes):
        result = row[:-1].rstrip() + b"," + msgspec.json.encode({name: result})[1:]
    return bytes(result)


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
