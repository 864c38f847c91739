"""The folder OUTPUT.work: its lock, and the states and results that a job keeps there.

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
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

import msgspec

from gpuscore.commands.bulk.inputs import FileState
from gpuscore.errors import ConfigError

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class JobState(msgspec.Struct, frozen=True):
    """The settings and the input of a job.

    Attributes:
        parts: the number of rows of each.
        schema: of the columns of JSON lines, if the output is Parquet.
    """

    file: ClassVar[str] = "job.state"
    settings: dict[str, Any]
    inputs: dict[str, FileState]
    parts: list[Count]
    schema: bytes | None


class WrittenState(msgspec.Struct, frozen=True):
    """The note that the output is whole, and the outcome of a job.

    Attributes:
        scored: rows of the output; for requests, answers that are errors are included.
        failed: requests that were answered with an error.
        bad: rows in OUTPUT.bad.jsonl.
        output, bad_rows: the SHA-256 of both files.
    """

    file: ClassVar[str] = "written.state"
    scored: Count
    failed: Count
    bad: Count
    output: str
    bad_rows: str

    @property
    def rows(self) -> int:
        """All rows of the input."""
        return self.scored + self.bad

    def too_bad(self, most: float) -> bool:
        """Return True if all rows, or a larger share than `most`, are bad or failed."""
        bad = self.bad + self.failed
        return bad > 0 and (bad == self.rows or bad > most * self.rows)


class Answer(msgspec.Struct, frozen=True):
    """The answer to a line of a file of requests: JSON without a line end."""

    line: bytes
    failed: bool


# A row's scores, the reason why it is bad, or its answer; None: it has no result yet.
Result: TypeAlias = list[float] | str | Answer | None

OUTPUT, BAD_ROWS = "output.new", "bad.new"
_FILES = re.compile(r"(job|written)\.state(\.new)?|[0-9]+\.part(\.new)?|(output|bad)\.new")
# Those that a run leaves which is killed before its job is noted, or when all else is removed.
_ALONE = {f"{JobState.file}.new", WrittenState.file}
_DIGEST = hashlib.sha256().digest_size
T = TypeVar("T")
State = TypeVar("State", JobState, WrittenState)


class WorkFolder:
    """The folder of a job, whose lock this process holds."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, kind: type[State]) -> State | None:
        """Return a state that was written, or None; raise ConfigError if it is damaged."""
        state = self._load(kind.file, kind)
        if state is None and (self.path / kind.file).exists():
            raise self.damaged(f"{kind.file} is not as it was written")
        return state

    def write(self, state: JobState | WrittenState) -> None:
        self._save(state.file, state)

    def results(self, part: int, count: int) -> list[Result]:
        """Return the results of a part of so many rows; none if its file is missing or damaged."""
        results = self._load(f"{part}.part", list[Result])
        return results if results is not None and len(results) == count else [None] * count

    def keep(self, part: int, results: list[Result]) -> None:
        """Write the results of a part, over those that it had."""
        self._save(f"{part}.part", results)

    def damaged(self, what: str) -> ConfigError:
        """Return the error that says which file of the folder is not as a run has left it."""
        return ConfigError(f"{self.path} is damaged: {what}; remove it to begin anew")

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

    def _save(self, name: str, value: Any) -> None:
        content = msgspec.msgpack.encode(value)
        temporary = self.path / f"{name}.new"
        temporary.write_bytes(hashlib.sha256(content).digest() + content)
        sync(temporary)
        temporary.rename(self.path / name)
        sync(self.path)

    def clear(self, but: tuple[str, ...] = ()) -> None:
        """Remove the job's files except these; other files stay."""
        for name in _entries(self.path):
            if _FILES.fullmatch(name) and name not in but:
                (self.path / name).unlink()

    def remove(self) -> None:
        """Remove the folder, and last the note that the output is whole, in case of a kill."""
        self.clear(but=(JobState.file, WrittenState.file))
        sync(self.path)
        for name in (JobState.file, WrittenState.file):
            (self.path / name).unlink(missing_ok=True)
        try:
            self.path.rmdir()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # somebody else has put a file into it
                raise


@contextmanager
def locked(output: Path) -> Iterator[WorkFolder]:
    """Make and lock the work folder of an output; the kernel drops the lock of a dead process.

    Raises:
        ConfigError: another process holds the folder, it has files that are no job's, or it cannot
            be made.
    """
    folder = output.with_name(f"{output.name}.work")
    while True:
        try:
            folder.mkdir(exist_ok=True)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise ConfigError(f"--output {output}: {folder}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_there(lock, folder):  # the other run has removed it just now
                continue
            _refuse_others(output, folder)
            work = WorkFolder(folder)
            try:
                yield work
            except BaseException:
                if not any((folder / kind.file).exists() for kind in (JobState, WrittenState)):
                    work.remove()  # there is no job yet
                raise
            return
        except BlockingIOError:
            raise ConfigError(f"--output {output}: another run is writing it") from None
        finally:
            os.close(lock)


def _refuse_others(output: Path, folder: Path) -> None:
    """Raise ConfigError if the folder holds a file that is not a job's; a link never is."""
    entries = _entries(folder)
    for name, entry in entries.items():
        known = _FILES.fullmatch(name) if JobState.file in entries else name in _ALONE
        if not (known and entry.is_file(follow_symlinks=False)):
            raise ConfigError(
                f"--output {output}: {folder} holds {name}, which belongs to no job; move it away "
                "or choose another --output"
            )


def _entries(folder: Path) -> "dict[str, os.DirEntry[str]]":
    with os.scandir(folder) as entries:
        return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}


def _is_there(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def sync(path: Path) -> None:
    """Have a file or a folder written to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
