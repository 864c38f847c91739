"""The reference page of the settings, from the fields of the configuration."""

import re

from generate.markdown import code, page, table
from gpuscore.config import API_KEY_VARIABLE, CONFIGS, FileConfig
from gpuscore.config.options import Option, options, plain

NAMES = re.compile(r"(?<![\w/])(--[a-z][a-z-]*[a-z]|GPUSCORE_\w+|/(?:v1/)?[a-z]+)(?![\w/])")
UNITS = {"SECONDS": "seconds, ", "TOKENS": "tokens, ", "BYTES": "bytes, "}  # by name of the value


def page_of_settings() -> str:
    blocks = []
    for config in (*CONFIGS, FileConfig):
        blocks += [f"## {(config.__doc__ or '').rstrip('.')}", _table(config)]
    return page(
        "Settings",
        "Every setting of `gpuscore serve` may be a flag, an environment variable or a line of the "
        "TOML file that `--config` names. A flag overrides a variable, a variable overrides the "
        "file, and the file overrides the default. A line of the file has the flag's name with "
        "underscores: `max_items = 500`. [Configuration](../how-to/configure.md) has examples, and "
        "`gpuscore info` shows the value and the source of each setting.",
        *blocks,
        "## API keys",
        f"Keys are never flags. {code(API_KEY_VARIABLE)} holds one key; `--api-key-file` names a "
        "file with one key per line.",
    )


def _table(config: type) -> str:
    rows = [(_names(option), _default(option), _meaning(option)) for option in options(config)]
    return table(("flag and variable", "default", "meaning"), rows)


def _names(option: Option) -> str:
    return "<br>".join(code(name) for name in (option.flag, option.variable))


def _default(option: Option) -> str:
    if option.default is None:
        return NAMES.sub(r"`\1`", option.unset) or "none"
    return code(plain(option.default))


def _meaning(option: Option) -> str:
    sentence = explained(option)
    return sentence if _lists_all(option) else f"{sentence} *Takes {_values(option)}.*"


def explained(option: Option) -> str:
    """Return the help as a sentence, with names of options and routes as code."""
    sentence = f"{option.help[:1].upper()}{option.help[1:]}."
    return NAMES.sub(r"`\1`", sentence)


def _lists_all(option: Option) -> bool:
    """Return True if the help already explains every choice."""
    return bool(option.choices) and all(choice in option.help for choice in option.choices)


def _values(option: Option) -> str:
    unit = "" if option.size else UNITS.get(option.metavar, "")
    return f"{unit}{option.supported}"
