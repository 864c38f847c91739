"""The folder OUTPUT.work: the lock and the state of a job, and how its output appears."""

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpuscore.errors import ConfigError

LOCK, JOB, PLAN, SCORED_MARK, WRITTEN = (
    "lock",
    "job.json",
    "plan.json",
    "scored.json",
    "written.json",
)


class WorkFolder:
    """The folder of a job, whose lock this process holds."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a state that was written, or None."""
        try:
            found: dict[str, Any] = json.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            return None
        return found

    def need(self, name: str) -> dict[str, Any]:
        """Return a state that an earlier step has written."""
        found = self.read(name)
        if found is None:
            raise ValueError(f"{self.path / name} is missing")
        return found

    def write(self, name: str, state: dict[str, Any]) -> None:
        """Write a state so that it is there whole or not at all, even after a loss of power."""
        temporary = self.path / f"{name}.new"
        temporary.write_text(json.dumps(state))
        sync_file(temporary)
        temporary.rename(self.path / name)
        sync_folder(self.path)

    def clear(self, but: Collection[str] = (LOCK,)) -> None:
        """Remove everything but these files."""
        for path in self.path.iterdir():
            if path.name in but:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def remove(self) -> None:
        """Remove the folder; the note that the output is whole goes last, in case of a kill."""
        self.clear(but=(LOCK, WRITTEN))
        self.clear()
        shutil.rmtree(self.path)


@contextmanager
def locked(output: Path) -> Iterator[WorkFolder]:
    """Make and lock the work folder of an output; the kernel drops the lock of a dead process.

    Raises:
        ConfigError: another process holds it, or the folder cannot be made.
    """
    folder = output.with_name(f"{output.name}.work")
    while True:
        try:
            folder.mkdir(exist_ok=True)
            file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
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


def _held(work: WorkFolder) -> Iterator[WorkFolder]:
    """Yield a locked folder; remove it after an error before there was a job in it."""
    try:
        yield work
    except BaseException:
        if work.path.exists() and work.read(JOB) is None:
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
