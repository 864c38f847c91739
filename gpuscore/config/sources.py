"""The sources of values: command line, else environment, else TOML file, else default.

Every source is checked completely, even values that another source overrides. No message shows the
value of an unknown name, because the name may be the API key's, misspelt.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuscore.config import API_KEY_VARIABLE, CONFIGS, FileConfig
from gpuscore.config.options import PREFIX, ConfigT, Option, options, shown
from gpuscore.errors import ConfigError

DEFAULT = "default"
COMMAND_LINE = "command line"
SHOWS_ALL = "`gpuscore serve --help-all` shows all"
OPTIONS = {item.name: item for item in options(*CONFIGS)}
(CONFIG,) = options(FileConfig)
# Set by Kubernetes in every pod, beside others, for a Service named gpuscore or gpuscore-something.
KUBERNETES = "_SERVICE_HOST"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it was set: "default", "command line", a file or a variable."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Settings:
    """One checked value per field of the configuration, by field name."""

    chosen: Mapping[str, Setting]

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
    overrides = dict(_from_environment(environment)) | dict(_from_flags(flags))
    file = overrides.pop(CONFIG.name, None)
    return Settings(chosen | ({} if file is None else _from_file(file.value)) | overrides)


def _from_flags(flags: Mapping[str, Any]) -> Iterator[tuple[str, Setting]]:
    for item in (*OPTIONS.values(), CONFIG):
        if item.name in flags:
            value = flags[item.name]
            value = ",".join(value) if isinstance(value, list) else value
            yield item.name, _setting(item, value, item.flag, COMMAND_LINE)


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, Setting]]:
    """Yield the settings of the environment.

    An empty variable counts as unset: `docker run -e X=` and compose's ${X:-} make such variables.
    """
    names = sorted(environment.keys() - {API_KEY_VARIABLE})
    variables = {name: environment[name] for name in names if name.startswith(PREFIX)}
    for variable, text in variables.items():
        if variable.endswith(KUBERNETES):
            raise ConfigError(
                f"{variable}={text} was set by Kubernetes for a Service whose name begins with "
                "gpuscore: set enableServiceLinks: false in the pod spec, or rename the Service"
            )
    known = {item.variable: item for item in (*OPTIONS.values(), CONFIG)}
    for variable, text in variables.items():
        if variable not in known:
            raise ConfigError(f"there is no environment variable {variable}; {SHOWS_ALL}")
        if text:
            item = known[variable]
            value = item.from_text(text)
            yield item.name, _setting(item, value, variable, f"environment {variable}")


def _from_file(path: str) -> dict[str, Setting]:
    values = {}
    for key, value in _read_toml(path).items():
        if key == "api_key":
            raise ConfigError(
                f"{path}: api_key is a secret and must not be in this file: set "
                f"{API_KEY_VARIABLE}, or name a file of keys with api_key_file"
            )
        if key not in OPTIONS:
            raise ConfigError(f"{path}: there is no key {shown(key)}; {SHOWS_ALL}")
        item = OPTIONS[key]
        values[key] = _setting(item, item.read(value), f"{path}: {key}", f"file {path}")
    return values


def _read_toml(path: str) -> dict[str, Any]:
    try:  # with a final line end, tomllib can locate errors in the last line
        return tomllib.loads(Path(path).read_bytes().decode() + "\n")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"configuration file {path}: {error}") from error


def _setting(item: Option, value: Any, place: str, source: str) -> Setting:
    if problem := item.problem(value):
        raise ConfigError(f"{place} {problem}")
    return Setting(value, source)
