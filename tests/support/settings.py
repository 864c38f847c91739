"""Settings read from all their sources, each written as a user would write it."""

import argparse
import json
from functools import cache

import pytest

from gpuscore.config import CONFIGS, FileConfig
from gpuscore.config.flags import add_flags
from gpuscore.config.options import options
from gpuscore.config.sources import read_settings

OPTIONS = list(options(*CONFIGS))


SOURCES = ("file", "environment", "command line")  # from the weakest to the strongest


SECRET = "key-that-nobody-may-see"


each_option = pytest.mark.parametrize("item", OPTIONS, ids=lambda item: item.name)


def two_values(item):
    """Return two valid values that are not the default; a bool has only one such value."""
    if item.kind is bool:
        return True, False
    if item.choices:
        return item.choices[-2:]
    if item.kind is str:
        return "first value", "1"
    low = item.minimum or 0
    return (item.kind(low + 7), item.kind(low + 8)) if item.kind is int else (low + 0.5, low + 0.75)


def read(tmp_path, sources):
    """Return the settings of {source: {name: value}}, each source written as a user would write
    it."""
    arguments, environment = [], {"HOME": "/", "PATH": "/bin"}
    if "file" in sources:
        path = tmp_path / "gpuscore.toml"
        path.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in sources["file"].items()))
        environment["GPUSCORE_CONFIG"] = str(path)
    for name, value in sources.get("environment", {}).items():
        environment["GPUSCORE_" + name.upper()] = as_text(value)
    for name, value in sources.get("command line", {}).items():
        (flag,) = (item.flag for item in OPTIONS if item.name == name)
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-"))
        else:
            arguments += [as_text(value)] if name == "model" else [flag, as_text(value)]
    return read_settings(parsed(arguments), environment)


def parsed(arguments):
    return vars(_parser().parse_args(arguments))


@cache
def _parser():
    parser = argparse.ArgumentParser()
    add_flags(parser, *CONFIGS, FileConfig)
    return parser


def as_text(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


def source_name(source, item, tmp_path):
    names = {"file": f"file {tmp_path / 'gpuscore.toml'}", "environment": f"environment {item}"}
    return names.get(source, source)
