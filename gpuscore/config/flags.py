"""The command-line flags, made from the fields of the configuration."""

import argparse
import textwrap
from collections.abc import Callable, Collection
from typing import Any

from gpuscore.config import API_KEY_VARIABLE
from gpuscore.config.options import Option, options, plain, shown

EPILOG = """\
An option that is not marked as "command line only" may also be an environment
variable or a line of the --config file:

  --max-batch-tokens 4096
  GPUSCORE_MAX_BATCH_TOKENS=4096
  max_batch_tokens = 4096

The command line overrides the environment, the environment overrides the file.
`gpuscore info` takes the options of serve and shows the source of each value."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A help format with a wide left column for flags, and no line breaks at hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def add_flags(parser: argparse.ArgumentParser, *configs: type) -> None:
    """Add a group per configuration dataclass, with one flag per field.

    A flag that is not given sets nothing in the namespace: `sources` adds the defaults.
    """
    for config in configs:
        group = parser.add_argument_group((config.__doc__ or "").rstrip("."))
        for item in options(config):
            _add_flag(group, item)


def add_some_flags(
    parser: argparse.ArgumentParser, title: str, config: type, names: Collection[str]
) -> None:
    """Add a group of only these fields of a configuration dataclass, as `add_flags` does."""
    group = parser.add_argument_group(title)
    for item in options(config):
        if item.name in names:
            _add_flag(group, item)


def refuse_api_key(parser: argparse.ArgumentParser) -> None:
    """Refuse --api-key; without this flag, argparse would print the key as an unknown argument."""
    parser.add_argument("--api-key", nargs="?", action=_ApiKey, help=argparse.SUPPRESS)


def refuse_pipelines(parser: argparse.ArgumentParser) -> None:
    """Refuse the flags by which other servers put a model's layers on several devices in a row."""
    names = ("--pipeline-parallel", "--pipeline-parallel-size", "--pp-size")
    parser.add_argument(*names, nargs="?", action=_Pipeline, help=argparse.SUPPRESS)


class _Pipeline(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        parser.error(
            f"{option_string} is not supported: the layers of a model run on the same devices; "
            "--tensor-parallel divides every layer among several"
        )


class _ApiKey(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(
            "--api-key is not supported, because every user of the machine can read the command "
            f"line; set {API_KEY_VARIABLE} or --api-key-file"
        )


class _Repeated(argparse.Action):
    """Joins the values of a repeated flag by commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


def _add_flag(group: Any, item: Option) -> None:
    words: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(item)}
    if item.positional:
        words |= {"nargs": "?", "metavar": item.metavar}
    elif item.repeated:
        words |= {"dest": item.name, "action": _Repeated, "metavar": item.metavar}
    elif item.kind is bool:
        words |= {"action": argparse.BooleanOptionalAction}
    elif item.choices:
        words |= {"choices": item.choices}
        if item.metavar:  # the help text lists the choices, because there are many
            words |= {"metavar": item.metavar}
    else:
        words |= {"type": _reader(item), "metavar": item.metavar}
    group.add_argument(item.flag, **words)


def _help(item: Option) -> str:
    default = item.unset if item.default is None else plain(item.default)
    return f"{item.help} (default: {default})" if default else item.help


def _reader(item: Option) -> Callable[[str], Any]:
    """Return argparse's reader of a value, for which a wrong type is a usage error.

    `sources` checks the range.
    """

    def read(text: str) -> Any:
        value = item.from_text(text)
        if isinstance(value, str) and item.kind is not str:
            raise argparse.ArgumentTypeError(f"must be {item.supported}, got {shown(text)}")
        return value

    return read
