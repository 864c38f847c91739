"""The one reader of a model directory's files: what is there and cannot be read is an error."""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from gpuscore.errors import ConfigError

# Bytes. The largest of the hub: an index of 10 MB, a tokenizer_config.json of 1 MB, and chat
# templates of 20 KB. Python's objects take about 20 times a JSON file's size.
MAX_JSON = 32 * 2**20
MAX_TEMPLATE = 2**20
MAX_TOKENIZER = 512 * 2**20
MAX_DEPTH = 64  # objects and lists in each other
SHOWN = 200  # characters of a value or a reason in an error


def is_file(path: Path, limit: int | None = None) -> bool:
    """Whether there is a file to read; False only where nothing has this name.

    Args:
        limit: bytes that it may have.

    Raises:
        ConfigError: a link that leads nowhere, a directory, a pipe, or a file that may not be read.
    """
    if not os.path.lexists(path):
        return False
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        link = ", it is a link" if path.is_symlink() else ""
        raise ConfigError(f"{path} is there but cannot be read: {error.strerror}{link}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise ConfigError(f"{path} must be a file, but is {kind}")
    if limit is not None and status.st_size > limit:
        raise ConfigError(f"{path} has {status.st_size:,} bytes; supported: at most {limit:,}")
    return True


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_text(path: Path, limit: int) -> str | None:
    """A file of at most `limit` bytes of UTF-8; None if there is none. ConfigError as `is_file`."""
    if not is_file(path, limit):
        return None
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error


def read_json(path: Path) -> Any:
    """A JSON file whose numbers are finite; None if there is none.

    Raises:
        ConfigError: as `is_file`, or it is not JSON, too large, or nested too deep.
    """
    text = read_text(path, MAX_JSON)
    if text is None:
        return None
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        _check_depth(value)
    except RecursionError:
        raise ConfigError(f"{path} is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {str(error)[:SHOWN]}") from error
    return value


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if there is no such file. Raises ConfigError as `read_json`."""
    if not is_file(path):
        return None
    return as_object(read_json(path), str(path))


def as_object(value: Any, name: str) -> dict[str, Any]:
    """The value, which has to be a JSON object; ConfigError names it otherwise."""
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, found {shown(value)}")
    return value


def shown(value: Any) -> str:
    """A value of a file as part of an error: one line of bounded length."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON; numbers are finite")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:SHOWN]} is over every float; numbers are finite")
    return number


def _check_depth(value: Any) -> None:
    """Raises RecursionError where later walks through the value could end in one."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise RecursionError
