"""The input files of a job, and how a change of them is found."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuscore.bulk.options import JSON_LINES, SUFFIXES, BatchOptions
from gpuscore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class InputFiles:
    """Files of one format, in the order of their names."""

    format: str
    paths: tuple[Path, ...]


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


def identify(inputs: InputFiles) -> dict[str, dict[str, Any]]:
    """Return size, time of change and SHA-256 of each file, by name; reads every file."""
    return {path.name: {**_stat(path), "sha256": _digest(path)} for path in inputs.paths}


def refuse_changed(inputs: InputFiles, known: dict[str, Any], read_all: bool = False) -> None:
    """Raise ConfigError if a file is not the one that `identify` saw.

    A file of the same size and time counts as the same. One with another time is read, and its
    SHA-256 decides; with `read_all` every file is read.
    """
    names = [path.name for path in inputs.paths]
    if names != list(known):
        differ = sorted(set(names) ^ set(known)) or names
        raise ConfigError(f"the files of --input changed: {', '.join(differ)}")
    for path in inputs.paths:
        was, now = known[path.name], _stat(path)
        if was["size"] != now["size"]:
            raise ConfigError(
                f"--input {path} changed: it had {was['size']} bytes and has {now['size']}"
            )
        same_time = was["mtime_ns"] == now["mtime_ns"]
        if (read_all or not same_time) and _digest(path) != was["sha256"]:
            raise ConfigError(f"--input {path} changed: its content has another SHA-256")


def _stat(path: Path) -> dict[str, int]:
    found = path.stat()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
