"""Options: configuration fields, with their names in all sources and their valid values."""

import json
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any, TypeVar

from gpuscore.errors import ConfigError

ConfigT = TypeVar("ConfigT")

PREFIX = "GPUSCORE_"  # every environment variable starts with it
PLACES = ("MODEL", "DIRECTORY", "FILE")  # metavars of values that may be paths of this machine
SHOWN_CHARACTERS = 60  # most characters of a value in an error
_SIZE = re.compile(r"([0-9]{1,15})(|KiB|MiB|GiB|TiB)")
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True, slots=True)
class Option:
    """A setting: a field of a configuration dataclass, with its default, help and range.

    Attributes:
        unset: describes the default None.
        metavar: the value's name in the help; by default N or NAME, or the choices.
        common: shown by --help; the others are shown only by --help-all.
        repeated: the flag, if it may be given several times; commas join its values.
        name, kind: the field's name, and its type: bool, int, float or str.
    """

    default: Any
    help: str
    unset: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    metavar: str = ""
    common: bool = False
    repeated: str = ""
    name: str = ""
    kind: type = str

    @property
    def flag(self) -> str:
        return self.repeated or "--" + self.name.replace("_", "-")

    @property
    def size(self) -> bool:
        """True if the value is a number of bytes; text may use KiB, MiB, GiB or TiB."""
        return self.metavar == "BYTES"

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def supported(self) -> str:
        """A description of the valid values, to follow "must be"."""
        if self.size:
            return f"a size such as 512MiB or 4GiB, in bytes at least {self.minimum}"
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        nouns = {bool: "true or false", str: "a non-empty string", int: "an integer"}
        noun = nouns.get(self.kind, "a number")
        if self.maximum is not None:
            return f"{noun} from {self.minimum} to {self.maximum}"
        return noun if self.minimum is None else f"{noun} of at least {self.minimum}"

    def problem(self, value: object) -> str | None:
        """Return why the value is invalid, as text to put after the setting's name; or None."""
        return None if self._takes(value) else f"must be {self.supported}, got {shown(value)}"

    def _takes(self, value: Any) -> bool:
        if value is None:
            return self.default is None
        types = (int, float) if self.kind is float else (self.kind,)
        if type(value) not in types or value == "" or (self.choices and value not in self.choices):
            return False
        at_least = self.minimum is None or value >= self.minimum
        return at_least and (self.maximum is None or value <= self.maximum)

    def read(self, value: object) -> Any:
        """Return a file's or an argument's value; only a size may be given as text."""
        return self.from_text(value) if self.size and isinstance(value, str) else value

    def from_text(self, text: str) -> Any:
        """Return the value that a text stands for; the text itself if it has the wrong type."""
        if self.size:
            match = _SIZE.fullmatch(text)
            return int(match[1]) * _UNITS[match[2]] if match else text
        if self.kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}.get(text, text)
        if self.kind is str or "_" in text or text != text.strip() or not text.isascii():
            return text  # Python's int and float would accept 1_000, " 7" and ٧
        try:
            return self.kind(text)
        except ValueError:
            return text


def option(default: Any, help: str, **more: Any) -> Any:
    """Declare a field of a configuration dataclass; see `Option`."""
    return field(default=default, metadata={"option": Option(default, help, **more)})


common = partial(option, common=True)
count = partial(option, minimum=1)
duration = partial(option, metavar="SECONDS", minimum=0.1, maximum=86400)
tokens = partial(option, metavar="TOKENS", minimum=1)
size_in_bytes = partial(option, metavar="BYTES", minimum=1)


def options(*configs: type) -> Iterator[Option]:
    """Yield the fields of the configuration dataclasses."""
    for config in configs:
        yield from _options_of(config)


@cache
def _options_of(config: Any) -> tuple[Option, ...]:
    hints = typing.get_type_hints(config)
    listed = []
    for item in fields(config):
        if (option := item.metadata.get("option")) is None:
            continue
        kind = _scalar(hints[item.name])
        metavar = option.metavar or ("" if option.choices else "NAME" if kind is str else "N")
        listed.append(replace(option, name=item.name, kind=kind, metavar=metavar))
    return tuple(listed)


def checked(config: ConfigT) -> ConfigT:
    """Return the configuration with sizes in bytes.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """
    values = {item.name: item.read(getattr(config, item.name)) for item in options(type(config))}
    for item in options(type(config)):
        if problem := item.problem(values[item.name]):
            raise ConfigError(f"{item.name} {problem}")
    return replace(config, **values)  # type: ignore[type-var]  # a dataclass


def changed(*configs: Any) -> dict[str, Any]:
    """Return the options that differ from their defaults, without paths and addresses."""
    return {
        item.name: value
        for config in configs
        for item in options(type(config))
        if (value := getattr(config, item.name)) != item.default and item.metavar not in PLACES
    }


def shown(value: object) -> str:
    """Return a value as errors show it: on one line, not too long, without a list's contents."""
    if isinstance(value, list | dict):
        return "an array" if isinstance(value, list) else "a table"
    quoted = isinstance(value, str | bool)
    text = json.dumps(value, ensure_ascii=False) if quoted else str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def plain(value: object) -> str:
    """Return a valid value as tables and help show it: 10 for 10.0, a name without quotes."""
    if value is None:
        return "not set"
    if isinstance(value, str) and value.isprintable():
        return value
    return shown(value).removesuffix(".0")


def _scalar(hint: Any) -> Any:
    """Return int for `int | None`, and any other type as it is."""
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint
