"""The sources of values: command line, else environment, else TOML file, else default.

Every source is checked completely, even values that another source overrides. No message holds the
value of an unknown name: the name may be a misspelt name of the API key.
"""

import difflib
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuscore.config import API_KEY_VARIABLE, CONFIGS, FileConfig
from gpuscore.config.options import PREFIX, ConfigT, Option, options, shown
from gpuscore.errors import ConfigError

DEFAULT, COMMAND_LINE = "default", "command line"
OPTIONS = {item.name: item for item in options(*CONFIGS)}
(CONFIG,) = options(FileConfig)
_FLAG = re.compile(r"(?<![\w-])(?:--[a-z][a-z-]*[a-z]|MODEL)(?![\w-])")  # in error messages
# Variables that Kubernetes sets in every pod for a Service named gpuscore or gpuscore-something.
KUBERNETES = re.compile(
    PREFIX + r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)=.*"
    r"|" + PREFIX + r"(\w+_)?PORT=(tcp|udp|sctp)://.*",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it was set: "default", "command line", a file or a variable."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Settings:
    """One checked value per field of the configuration, by field name."""

    chosen: Mapping[str, Setting]

    def sources(self, message: str) -> str:
        """Return an addition to an error: the sources of the values of the flags that it names.

        Leaves out defaults and the command line, which the reader has just written.
        """
        names = {item.message_name: item.name for item in OPTIONS.values()}
        chosen = {flag: self.chosen.get(names.get(flag, "")) for flag in _FLAG.findall(message)}
        places = [
            f"{flag} is set by {setting.source}"
            for flag, setting in chosen.items()
            if setting is not None and setting.source not in (DEFAULT, COMMAND_LINE)
        ]
        return f" ({', '.join(places)})" if places else ""

    def make(self, config: type[ConfigT]) -> ConfigT:
        return config(**{item.name: self.chosen[item.name].value for item in options(config)})


def read_settings(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Return the values in force, each with its source.

    Args:
        flags: the values of the command line, by field name; other names are ignored.
        environment: like os.environ; names that do not begin with GPUSCORE_ are ignored.

    Raises:
        ConfigError: an unknown name, or a value of wrong type or out of range.
    """
    chosen = {name: Setting(item.default, DEFAULT) for name, item in OPTIONS.items()}
    above = dict(_from_environment(environment)) | dict(_from_flags(flags))
    file = above.pop(CONFIG.name, None)
    return Settings(chosen | ({} if file is None else _from_file(file.value)) | above)


def _from_flags(flags: Mapping[str, Any]) -> Iterator[tuple[str, Setting]]:
    for item in (*OPTIONS.values(), CONFIG):
        if item.name in flags:
            value = flags[item.name]
            value = ",".join(value) if item.repeated else value
            yield item.name, _setting(item, value, item.flag, COMMAND_LINE)


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, Setting]]:
    """Yield the settings of the environment.

    An empty variable counts as unset: `docker run -e X=` and compose's ${X:-} make such variables.
    """
    variables = {name: environment[name] for name in sorted(environment) if name.startswith(PREFIX)}
    for variable, text in variables.items():
        if KUBERNETES.fullmatch(f"{variable}={text}"):
            raise ConfigError(
                f"{variable}={text} was set by Kubernetes for a Service whose name begins with "
                "gpuscore: set enableServiceLinks: false in the pod spec, or rename the Service"
            )
    known = {item.variable: item for item in (*OPTIONS.values(), CONFIG)}
    for variable, text in variables.items():
        if variable == API_KEY_VARIABLE:
            continue
        if variable not in known:
            hint = closest(variable, (*known, API_KEY_VARIABLE))
            raise ConfigError(f"there is no environment variable {variable}{hint}")
        if text:
            item, source = known[variable], f"environment {variable}"
            yield item.name, _setting(item, item.from_text(text), variable, source)


def _from_file(path: str) -> dict[str, Setting]:
    values = {}
    for key, value in _read_toml(path).items():
        if key == "api_key":
            raise ConfigError(
                f"{path}: api_key is a secret and must not be in this file: set "
                f"{API_KEY_VARIABLE}, or name a file of keys with api_key_file"
            )
        if isinstance(value, dict):
            raise ConfigError(
                f"{path}: {shown(key)} is a table; supported: one line per option and no tables, "
                "such as port = 8000"
            )
        if key not in OPTIONS:
            raise ConfigError(f"{path}: there is no key {shown(key)}{closest(key, OPTIONS)}")
        item = OPTIONS[key]
        values[key] = _setting(item, item.read(value), f"{path}: {key}", f"file {path}")
    return values


def _read_toml(path: str) -> dict[str, Any]:
    try:  # without a final line end, tomllib would not give the place of an error in the last line
        text = Path(path).read_bytes().decode() + "\n"
    except (OSError, ValueError) as error:
        raise ConfigError(f"configuration file {path}: {error}") from error
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _setting(item: Option, value: Any, place: str, source: str) -> Setting:
    if problem := item.problem(value):
        raise ConfigError(f"{place} {problem}")
    return Setting(value, source)


def closest(name: str, known: Collection[str]) -> str:
    """Return the end of an error about an unknown name, with the closest known name."""
    folded = {_fold(known_name): known_name for known_name in known}
    close = difflib.get_close_matches(_fold(name), folded, n=1)
    nearest = f"the closest is {folded[close[0]]}; " if close else ""
    return f"; {nearest}`gpuscore serve --help` shows all"


def _fold(name: str) -> str:
    return name.removeprefix(PREFIX).lower().replace("-", "_")
