"""The folder OUTPUT.work: the lock and the state of a job, and how its output appears."""

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

import msgspec

from gpuscore.commands.bulk.inputs import FileState
from gpuscore.errors import ConfigError

SORTED_FILE = r"[0-9]+\.rows"
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of the states that a step leaves for the next step, in a file of the folder."""

    file: ClassVar[str]


class JobState(_State, frozen=True):
    """The settings and the input of a job."""

    file: ClassVar[str] = "job.json"
    settings: dict[str, Any]
    inputs: dict[str, FileState]


class PlanState(_State, frozen=True):
    """The number of rows, the names of their sorted files, and the schema of JSON in Parquet."""

    file: ClassVar[str] = "plan.json"
    rows: Count
    sorted: list[Annotated[str, msgspec.Meta(pattern=f"^{SORTED_FILE}$")]]
    schema: bytes | None


class ScoredState(_State, frozen=True):
    """The note that every row has a result, and the number of a row's scores."""

    file: ClassVar[str] = "scored.json"
    width: Annotated[int, msgspec.Meta(ge=1)]


class WrittenState(_State, frozen=True):
    """The note that the output is whole, and the outcome of a job.

    Attributes:
        scored: rows of the output; for requests, answers that are errors are included.
        failed: requests that were answered with an error.
        bad: rows in OUTPUT.bad.jsonl.
        output, bad_rows: the SHA-256 of both files.
    """

    file: ClassVar[str] = "written.json"
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


LOCK, RESULTS, TEXTS, OUTPUT, BAD_ROWS = "lock", "results", "texts", "output.new", "bad.new"
SORTED = "sorted"  # the only folder
_SORTED_FILE = re.compile(SORTED_FILE)
_STATES = [state.file for state in (JobState, PlanState, ScoredState, WrittenState)]
_FILES = {LOCK, RESULTS, TEXTS, OUTPUT, BAD_ROWS, *_STATES, *(f"{name}.new" for name in _STATES)}
# Those that a run leaves which is killed before its job is noted, or when all else is removed.
_ALONE = {LOCK, f"{JobState.file}.new", WrittenState.file}
State = TypeVar("State", bound=_State)


class _Sealed(msgspec.Struct, forbid_unknown_fields=True):
    """A state in its file; the SHA-256 shows that it was not changed."""

    sha256: str
    state: msgspec.Raw


class WorkFolder:
    """The folder of a job, whose lock this process holds."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, kind: type[State]) -> State | None:
        """Return a state that was written, or None; raise ConfigError if it is damaged."""
        try:
            content = (self.path / kind.file).read_bytes()
        except FileNotFoundError:
            return None
        try:
            sealed = msgspec.json.decode(content, type=_Sealed)
            if hashlib.sha256(sealed.state).hexdigest() != sealed.sha256:
                raise self.damaged(f"{kind.file} is not as it was written")
            return msgspec.json.decode(sealed.state, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self.damaged(f"{kind.file}: {error}") from error

    def need(self, kind: type[State]) -> State:
        """Return a state that an earlier step has written; raise ConfigError if it is missing."""
        state = self.read(kind)
        if state is None:
            raise self.damaged(f"{kind.file} is missing")
        return state

    def damaged(self, what: str) -> ConfigError:
        """Return the error that says which file of the folder is not as a run has left it."""
        return ConfigError(f"{self.path} is damaged: {what}; remove it to begin anew")

    def write(self, state: _State) -> None:
        """Write a state so that it is there whole or not at all, even after a loss of power."""
        content = msgspec.json.encode(state)
        temporary = self.path / f"{state.file}.new"
        seal = _Sealed(hashlib.sha256(content).hexdigest(), msgspec.Raw(content))
        temporary.write_bytes(msgspec.json.encode(seal))
        sync_file(temporary)
        temporary.rename(self.path / state.file)
        sync_folder(self.path)

    def clear(self, but: Collection[str] = (LOCK, JobState.file)) -> None:
        """Remove the job's files except these; other files stay."""
        for name in _FILES.difference(but):
            (self.path / name).unlink(missing_ok=True)
        folder = self.path / SORTED
        if folder.is_dir():
            for path in folder.iterdir():
                if _SORTED_FILE.fullmatch(path.name):
                    path.unlink()
            _remove_empty(folder)

    def remove(self) -> None:
        """Remove the folder, and last the note that the output is whole, in case of a kill."""
        self.clear(but=(LOCK, JobState.file, WrittenState.file))
        sync_folder(self.path)
        for name in (JobState.file, WrittenState.file, LOCK):
            (self.path / name).unlink(missing_ok=True)
        _remove_empty(self.path)


def _remove_empty(folder: Path) -> None:
    """Remove a folder unless somebody else has put a file into it."""
    try:
        folder.rmdir()
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
    folder = output.with_name(f"{output.name}.work")
    while True:
        try:
            if folder.is_symlink():
                raise ConfigError(f"--output {output}: {folder} is a link; remove it")
            folder.mkdir(exist_ok=True)
            _refuse_others(output, folder)
            file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise ConfigError(f"--output {output}: {folder}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(file, folder / LOCK):  # the other run may have removed it just now
                yield from _held(WorkFolder(folder))
                return
        except BlockingIOError:
            raise ConfigError(f"--output {output}: another run is writing it") from None
        finally:
            os.close(file)


def _refuse_others(output: Path, folder: Path) -> None:
    """Raise ConfigError if the folder holds a file that is not a job's."""
    foreign = next(_foreign(folder), None)
    if foreign is not None:
        raise ConfigError(
            f"--output {output}: {folder} holds {foreign}, which belongs to no job; move it away "
            "or choose another --output"
        )


def _foreign(folder: Path) -> Iterator[str]:
    """Yield the entries of the folder that are not files of a job; links never are."""
    entries = _entries(folder)
    known = _FILES if JobState.file in entries else _ALONE
    for name, entry in entries.items():
        if name == SORTED and known is _FILES and entry.is_dir(follow_symlinks=False):
            for sorted_file in _entries(folder / SORTED).values():
                if not (
                    _SORTED_FILE.fullmatch(sorted_file.name)
                    and sorted_file.is_file(follow_symlinks=False)
                ):
                    yield f"{SORTED}/{sorted_file.name}"
        elif name not in known or not entry.is_file(follow_symlinks=False):
            yield name
        elif name == LOCK and entry.stat().st_size:
            yield f"{LOCK} with content"


def _entries(folder: Path) -> "dict[str, os.DirEntry[str]]":
    with os.scandir(folder) as entries:
        return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}


def _held(work: WorkFolder) -> Iterator[WorkFolder]:
    """Yield a locked folder; remove it after an error if it holds no job yet."""
    try:
        yield work
    except BaseException:
        if not any((work.path / kind.file).exists() for kind in (JobState, WrittenState)):
            work.remove()
        raise


def _is_there(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
