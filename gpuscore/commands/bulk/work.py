"""The folder OUTPUT.work, in which a batch job keeps its settings, results and finished output.

The process that runs the job locks it. Every file is written under another name and renamed, so it
is complete or does not exist, even after a kill or a power failure.
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

JOB = "job.state"  # the job's settings; empty after the output was published
OUTPUT = "output.new"
BAD_ROWS = "bad.new"
_FILES = re.compile(r"job\.state(\.new)?|[0-9]+\.part(\.new)?|(output|bad)\.new")

# A row's scores, a text that says why it is bad, or the answer to a request in JSON. None: the row
# has no result yet.
Result: TypeAlias = list[float] | str | bytes | None
ANSWERED = b'"response":{"status_code":200,'  # part of every answer but errors


class JobFolder:
    """The folder of a job. This process holds its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def settings(self) -> dict[str, Any] | None:
        """Return the settings of a job, or None; raise ConfigError if they are damaged."""
        state: dict[str, Any] | None = self._load(JOB, dict[str, Any])
        if state is None and (self.path / JOB).exists():
            raise self.damaged(f"{JOB} cannot be read")
        return state

    def refuse_changed(self, first: dict[str, Any], known: dict[str, Any]) -> None:
        """Raise ConfigError if a setting or the input has changed since the job began."""
        for name, now in known.items():
            if (was := first.get(name)) != now:
                changed = f"{name} was {plain(was)} when this job began and is {plain(now)} now"
                raise ConfigError(f"{changed}; to start the job again, remove {self.path}")

    def damaged(self, what: str) -> ConfigError:
        """Return the error for a damaged folder."""
        return ConfigError(f"{self.path} is damaged: {what}; to start the job again, remove it")

    def results(self, part: int, count: int) -> list[Result]:
        """Return the results of a part of `count` rows; all None if its file is damaged."""
        results: list[Result] | None = self._load(f"{part}.part", list)
        return results if results is not None and len(results) == count else [None] * count

    def _load(self, name: str, kind: Any) -> Any:
        with suppress(FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return msgspec.msgpack.decode((self.path / name).read_bytes(), type=kind)
        return None

    def save(self, name: str, value: dict[str, Any] | list[Result]) -> None:
        """Write a file, which replaces an older one."""
        new = self.path / f"{name}.new"
        new.write_bytes(msgspec.msgpack.encode(value))
        sync(new)
        new.rename(self.path / name)
        sync(self.path)

    def clear(self) -> None:
        """Remove the job's files; the state last, because it shows that the others are a job's."""
        if (self.path / JOB).exists():
            self.save(JOB, {})
        for name in sorted(os.listdir(self.path), key=lambda name: name == JOB):
            if _FILES.fullmatch(name):
                (self.path / name).unlink()

    def remove(self) -> None:
        """Remove the job's files, and the folder if it is then empty."""
        self.clear()
        with suppress(OSError):
            self.path.rmdir()


@contextmanager
def locked(output: Path) -> Iterator[JobFolder]:
    """Create and lock the folder of a job. The kernel releases the lock when the process ends.

    Raises:
        ConfigError: another process holds the lock, the folder has other files, or it cannot be
            created.
    """
    folder = JobFolder(output.with_name(f"{output.name}.work"))
    try:
        folder.path.mkdir(exist_ok=True)
        lock = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"--output {output}: {folder.path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # False if the folder was just removed.
            held = os.path.samestat(os.fstat(lock), folder.path.stat())
        except (BlockingIOError, FileNotFoundError):
            held = False
        if not held:
            raise ConfigError(f"--output {output}: another process is writing it")
        if other := _other_file(folder.path):
            problem = f"{folder.path} holds {other}, which is not part of a job"
            raise ConfigError(f"--output {output}: {problem}; move it or choose another --output")
        try:
            if folder.settings() == {}:  # an earlier run was killed just before this step
                folder.clear()
            yield folder
        except BaseException:
            if not (folder.path / JOB).exists():  # there is no job yet
                folder.remove()
            raise
    finally:
        os.close(lock)


def _other_file(folder: Path) -> str | None:
    """Return the name of a file or link that is not part of a job, or None."""
    with os.scandir(folder) as listed:
        files = {entry.name: entry.is_file(follow_symlinks=False) for entry in listed}
    ours = {name for name in files if JOB in files and _FILES.fullmatch(name)} | {f"{JOB}.new"}
    return min((name for name in files if name not in ours or not files[name]), default=None)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_output(source: Input, options: BatchOptions, folder: JobFolder) -> tuple[int, int]:
    """Write the output and the bad rows into the job's folder; return the number of bad rows, and
    of requests that were answered with an error."""
    bad = failed = 0
    added = options.scores_column

    def good() -> Iterator[tuple[Block, dict[int, Any]]]:
        """Yield each block with the results of its good rows by index."""
        nonlocal bad, failed
        for number, block in enumerate(source.blocks()):
            results: dict[int, Any] = {}
            for index, result in enumerate(folder.results(number, len(block.rows))):
                if result is None:
                    raise folder.damaged(f"a row of {number}.part has no result")
                if isinstance(result, str):
                    bad_rows.write(msgspec.json.encode(block.describe(index, result)) + b"\n")
                    bad += 1
                else:
                    results[index] = result
                    failed += isinstance(result, bytes) and ANSWERED not in result
            yield block, results

    with (folder.path / BAD_ROWS).open("wb") as bad_rows:
        if source.format == PARQUET:
            from gpuscore.commands.bulk.parquet import write_parquet

            write_parquet(folder.path / OUTPUT, source.path, added, good())
        else:
            with (folder.path / OUTPUT).open("wb") as file:
                for block, results in good():
                    for index, result in results.items():
                        file.write(_output_line(block.rows[index], added, result) + b"\n")
    for name in (OUTPUT, BAD_ROWS):
        sync(folder.path / name)
    return bad, failed


def _output_line(row: Any, name: str, result: Any) -> bytes:
    """Return the answer to a request, or the input's line with its scores as field `name`."""
    if not isinstance(result, bytes):
        result = row[:-1].rstrip() + b"," + msgspec.json.encode({name: result})[1:]
    return bytes(result)


def publish(options: BatchOptions, folder: JobFolder, any_bad: bool) -> None:
    """Move the files to their final names and remove the job's folder.

    Raises:
        ConfigError: another file of that name has appeared since the job began.
    """
    files = {folder.path / BAD_ROWS: options.bad_rows} if any_bad else {}
    files[folder.path / OUTPUT] = options.target
    for new, path in files.items():
        refuse_existing(path, new)
    for new, path in files.items():
        new.rename(path)
    sync(options.target.absolute().parent)
    folder.remove()


def refuse_existing(path: Path, new: Path | None = None) -> None:
    """Raise ConfigError if a file or link of the output's name exists, unless it equals `new`,
    because an earlier run has put it there."""
    if not os.path.lexists(path):
        return
    if new is None or path.is_symlink() or not filecmp.cmp(path, new, shallow=False):
        raise ConfigError(f"{path} exists already; remove it or choose another --output")
