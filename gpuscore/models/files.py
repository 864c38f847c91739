"""The only reader of a model directory's files; an existing file that is unreadable is an error."""

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from gpuscore.errors import ConfigError

# Bytes. The largest files on the hub: an index of 10 MB, a tokenizer_config.json of 1 MB, and chat
# templates of 20 KB. Decoded, a JSON file takes about 20 times its size.
MAX_JSON = 32 * 2**20
MAX_TEMPLATE = 2**20
MAX_TOKENIZER = 512 * 2**20
MAX_DEPTH = 64  # most levels of nested objects and lists
SHOWN = 200  # most characters of a value or a reason in an error
FROM_TOKENS = "classifier_from_token"  # a key of config.json
# Endings of the names of architectures with a head over classes.
SEQUENCE = "ForSequenceClassification"
TOKENS = "ForTokenClassification"
PROCESS_REWARD = "ForProcessRewardModel"
CLASSIFIERS = (SEQUENCE, TOKENS, PROCESS_REWARD)


def is_file(path: Path, limit: int | None = None) -> bool:
    """Return True if the file can be read, and False if nothing has this name.

    Args:
        limit: the most bytes that the file may have.

    Raises:
        ConfigError: a link that leads nowhere, a directory, a pipe, a file that may not be read, or
            one with more than `limit` bytes.
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
    """Return a file of at most `limit` bytes of UTF-8 as text; None if there is none.

    Raises:
        ConfigError: `is_file` raises it, or the file is not UTF-8.
    """
    if not is_file(path, limit):
        return None
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error


def read_json(path: Path) -> Any:
    """Return the value in a JSON file, with finite numbers only; None if there is no such file.

    Raises:
        ConfigError: `is_file` raises it, or the file is not JSON, larger than MAX_JSON, or nested
            deeper than MAX_DEPTH.
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
    """Return the object in a JSON file; None if there is no such file.

    Raises:
        ConfigError: `read_json` raises it, or the value is not an object.
    """
    if not is_file(path):
        return None
    return as_object(read_json(path), str(path))


def as_object(value: Any, name: str) -> dict[str, Any]:
    """Return the value, which must be a JSON object; otherwise raise ConfigError with its name."""
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, found {shown(value)}")
    return value


def architecture_name(config: Mapping[str, Any]) -> str:
    """Return the architecture that a config.json names; empty if it names none.

    With vLLM's key FROM_TOKENS it names a classifier, which vLLM makes from rows of a causal head.
    Then the causal model is returned, because the directory has its weights.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if config.get(FROM_TOKENS) is None:
        return name
    return name.replace(SEQUENCE, "ForCausalLM")


def printable(text: str) -> str:
    """Escape control characters, with which a model's file could write to a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def shown(value: Any) -> str:
    """Return a value of a file as part of an error: one line of bounded length."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number in JSON; numbers must be finite")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:SHOWN]} is too large for a float; numbers must be finite")
    return number


def _check_depth(value: Any) -> None:
    """Raise RecursionError for a value so deep that recursion over it could fail later."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for container in level
            if isinstance(container, dict | list)
            for inner in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return
    raise RecursionError
