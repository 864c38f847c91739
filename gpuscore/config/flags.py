"""The command line: flags, made from the fields of the configuration, and commands' parsers."""

import argparse
import difflib
import textwrap
import tomllib
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gpuscore.config import CONFIGS
from gpuscore.config.options import Option, options, plain, shown

ALL = "--help-all"

EPILOG = """\
A setting may also be an environment variable (GPUSCORE_MAX_BATCH_TOKENS=4096)
or a line of the --config file (max_batch_tokens = 4096). The command line
overrides the environment, and the environment the file; `gpuscore info` shows
the source of each value."""


def other_flags() -> dict[str, str]:
    """Return a text for each flag of other servers, to put after the flag."""
    table = tomllib.loads(Path(__file__).with_name("other_flags.toml").read_text(encoding="utf-8"))
    return {
        name: f"is {row['ours']} here" if "ours" in row else f"is not supported: {row['why']}"
        for row in table["flags"]
        for name in row["names"].split()
    }


class AllOptions(argparse.RawDescriptionHelpFormatter):
    """The format of --help-all: a wide left column for flags, and no line breaks at hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class HelpFormatter(AllOptions):
    """The format of --help, which omits rarely needed settings."""

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest not in _rare():
            super().add_argument(action)


@cache
def _rare() -> frozenset[str]:
    return frozenset(item.name for item in options(*CONFIGS) if not item.common)


class CommandParser(argparse.ArgumentParser):
    """A parser whose error for an unknown flag suggests the right one."""

    def __init__(self, **words: Any) -> None:
        super().__init__(**({"allow_abbrev": False} | words))

    def add_help_all(self) -> None:
        """Add --help-all, for a command with rarely needed settings."""
        self.add_argument(ALL, action=_HelpAll, nargs=0, help="show all options, the rare ones too")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; exit with a usage error for an unknown word, which argparse would return.

        The error shows a flag without its value, which may be a secret.
        """
        values, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            self.error(self._unknown_flag(flags[0]) if flags else f"{unknown[0]} is one too many")
        return values, unknown

    def _unknown_flag(self, flag: str) -> str:
        known = [
            name
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for name in action.option_strings
            if name.startswith("--")
        ]
        flags_of_others = other_flags() if ALL in known else {}
        shown = f"`{self.prog} {ALL if ALL in known else '--help'}` shows all"
        if meaning := flags_of_others.get(flag.replace("_", "-")):
            return f"{flag} {meaning}; {shown}"
        close = difflib.get_close_matches(flag, known, n=1, cutoff=0.8)
        nearest = f"did you mean {close[0]}? " if close else ""
        return f"there is no {flag}; {nearest}{shown}"


def add_command(
    commands: Any, name: str, usage: str, help: str, description: str, epilog: str, run: object
) -> CommandParser:
    """Add a command, which `run` runs, to a parser's commands; `usage` follows "gpuscore"."""
    command: CommandParser = commands.add_parser(
        name,
        usage=f"gpuscore {usage}",
        description=description,
        help=help,
        epilog=epilog,
        formatter_class=HelpFormatter,
    )
    command.set_defaults(command=run)
    refuse_api_key(command)
    return command


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.formatter_class = AllOptions
        parser.print_help()
        parser.exit()


def add_flags(parser: argparse.ArgumentParser, *configs: type) -> None:
    """Add a group per configuration dataclass, with one flag per field.

    A flag that is not given sets nothing in the namespace: `sources` adds the defaults.
    """
    for config in configs:
        add_some_flags(parser, (config.__doc__ or "").rstrip("."), config)


def add_some_flags(
    parser: argparse.ArgumentParser, title: str, config: type, names: Collection[str] | None = None
) -> None:
    """Add a group with a flag per field of a configuration dataclass, or only for `names`."""
    group = parser.add_argument_group(title)
    for item in options(config):
        if names is None or item.name in names:
            _add_flag(group, item)


def refuse_api_key(parser: argparse.ArgumentParser) -> None:
    """Refuse --api-key; without this flag, argparse would print the key as an unknown argument."""
    parser.add_argument("--api-key", nargs="?", action=_ApiKey, help=argparse.SUPPRESS)


class _ApiKey(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(f"--api-key {other_flags()['--api-key']}")


def _add_flag(group: Any, item: Option) -> None:
    default = item.unset if item.default is None else plain(item.default)
    text = f"{item.help} (default: {default})" if default else item.help
    words: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
    if item.repeated:
        words |= {"action": "append", "metavar": item.metavar}
        if item.name == "model":
            group.add_argument("model", nargs="?", **words)
            words["help"] = "the same, for one model or several"
        words |= {"dest": item.name}
    elif item.kind is bool:
        words |= {"action": argparse.BooleanOptionalAction}
    elif item.choices:
        words |= {"choices": item.choices}
        if item.metavar:  # the help text lists the choices, because there are many
            words |= {"metavar": item.metavar}
    else:
        words |= {"type": _reader(item), "metavar": item.metavar}
    group.add_argument(item.flag, **words)


def _reader(item: Option) -> Callable[[str], Any]:
    """Return argparse's reader of a value; a wrong type becomes a usage error.

    `sources` checks the range.
    """

    def read(text: str) -> Any:
        value = item.from_text(text)
        if isinstance(value, str) and item.kind is not str:
            raise argparse.ArgumentTypeError(f"must be {item.supported}, got {shown(text)}")
        return value

    return read
