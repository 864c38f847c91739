"""The folder OUTPUT.work: its lock, and the state and results that a job keeps there.

Every file is written beside its place and renamed, so it is there whole or not at all, even after a
kill or a loss of power.
"""

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from gpuscore.errors import ConfigError

JOB, DONE = "job.state", "done.state"  # its name once the output is in its place
OUTPUT, BAD_ROWS = "output.new", "bad.new"
_FILES = re.compile(r"(job|done)\.state|job\.state\.new|[0-9]+\.part(\.new)?|(output|bad)\.new")
_DIGEST = hashlib.sha256().digest_size


class JobState(msgspec.Struct, frozen=True):
    """The settings that a run which goes on must have, too, and the number of rows of each part."""

    settings: dict[str, Any]
    parts: list[Annotated[int, msgspec.Meta(ge=0)]]


class Answer(msgspec.Struct, frozen=True):
    """The answer to a line of a file of requests: JSON without a line end."""

    line: bytes
    failed: bool


# A row's scores, the reason why it is bad, or its answer; None: it has no result yet.
Result: TypeAlias = list[float] | str | Answer | None
T = TypeVar("T")


class WorkFolder:
    """The folder of a job, whose lock this process holds."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def job(self, name: str = JOB) -> JobState | None:
        """Return the state of a job, or None; raise ConfigError if it is damaged."""
        state = self._load(name, JobState)
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

    def save(self, name: str, value: JobState | list[Result]) -> None:
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
        try:
            self.path.rmdir()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise


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
            if work.job(DONE):  # an earlier run was killed after all was done but this
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
