"""The input files of a job, and how a change of them is found."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpuscore.commands.bulk.options import JSON_LINES, SUFFIXES, BatchOptions
from gpuscore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class InputFiles:
    """Files of one format, in the order of their names."""

    format: str
    paths: tuple[Path, ...]


class FileState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The size, the time of change and the SHA-256 of a file."""

    size: int
    mtime_ns: int
    sha256: str


def find_inputs(options: BatchOptions) -> InputFiles:
    """Return the input's files.

    Files of a folder whose names begin with "." or "_" are left out; programs that write folders of
    tables mark them so.

    Raises:
        ConfigError: there are none, their formats are not supported or differ, or the output would
            be one of them.
    """
    place = options.input
    if place.is_dir():
        if options.output.absolute().parent.resolve() == place.resolve():
            raise ConfigError(f"--output {options.output} lies in the folder of --input")
        paths = sorted(path for path in place.iterdir() if path.name[0] not in "._")
        if not paths:
            raise ConfigError(f"--input {place}: the folder has no files")
    elif place.is_file():
        paths = [place]
    else:
        raise ConfigError(f"--input {place}: there is no such file or folder")
    formats = {_format_of(path) for path in paths}
    if len(formats) > 1:
        raise ConfigError(f"--input {place} mixes {' and '.join(sorted(formats))}; supported: one")
    (found,) = formats
    if options.requests and found != JSON_LINES:
        raise ConfigError(f"--input {place}: requests are JSON lines, not {found}")
    return InputFiles(found, tuple(paths))


def _format_of(path: Path) -> str:
    if path.suffix not in SUFFIXES or not path.is_file():
        raise ConfigError(f"--input {path}; supported: files that end with {', '.join(SUFFIXES)}")
    return SUFFIXES[path.suffix]


def identify(inputs: InputFiles) -> dict[str, FileState]:
    """Return the state of each file, by name; reads every file."""
    return {path.name: FileState(*_stat(path), sha256_of(path)) for path in inputs.paths}


def refuse_changed(inputs: InputFiles, known: dict[str, FileState], read_all: bool = False) -> None:
    """Raise ConfigError if a file is not the one that `identify` saw.

    A file of the same size and time counts as the same. One with another time is read, and its
    SHA-256 decides; with `read_all` every file is read.
    """
    names = [path.name for path in inputs.paths]
    if names != list(known):
        differ = sorted(set(names) ^ set(known)) or names
        raise ConfigError(f"the files of --input changed: {', '.join(differ)}")
    for path in inputs.paths:
        was, (size, time) = known[path.name], _stat(path)
        if was.size != size:
            raise ConfigError(f"--input {path} changed: it had {was.size} bytes and has {size}")
        if (read_all or was.mtime_ns != time) and sha256_of(path) != was.sha256:
            raise ConfigError(f"--input {path} changed: its content has another SHA-256")


def _stat(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
