"""The reference page of the command line: the --help text of every command."""

import argparse
import os
from collections.abc import Iterator

from generate.markdown import block, page, table
from gpuscore.commands.cli import make_parser
from gpuscore.config.flags import AllOptions, CommandParser

COLUMNS = "92"
# Before Python 3.13 each name of a flag has the value's name.
SAID_TWICE = ("-o FILE, --output FILE     ", "-o, --output FILE          ")
LONG = 4  # lines; shorter groups are repeated
EXIT_CODES = (
    ("0", "success"),
    ("1", "the command, a gate or a check failed"),
    ("2", "wrong usage, which includes a column or a server that is not there"),
    ("70", "the engine failed five times in a row, or never became ready"),
    ("75", "the model was not ready within `--load-timeout`"),
    ("78", "the configuration or the model cannot be served"),
    ("128 + the signal's number", "a signal stopped the server with requests unfinished"),
)


def page_of_commands() -> str:
    os.environ |= {"COLUMNS": COLUMNS, "PYTHON_COLORS": "0"}  # argparse reads them each time
    blocks, shown = [], dict[str, str]()
    for parser in _parsers(make_parser()):
        parser.formatter_class = AllOptions
        text = "\n\n".join(_without_repeats(parser, shown))
        blocks += [f"## {parser.prog}", block("text", text)]
    return page(
        "Command line",
        "This page shows the `--help-all` text of every command (`--help` leaves out settings that "
        "few need); groups of options that several "
        "commands share are shown once. [Settings](settings.md) explains every setting, with its "
        "environment variable.",
        *blocks,
        "## Exit codes",
        table(("code", "meaning"), EXIT_CODES),
    )


def _without_repeats(parser: argparse.ArgumentParser, shown: dict[str, str]) -> Iterator[str]:
    """Yield the parts of a help text; a group of options that `shown` has is only named.

    Args:
        parser: the command.
        shown: the commands that have shown each group, by the group's text; added to.
    """
    for part in parser.format_help().strip().replace(*SAID_TWICE).split("\n\n"):
        title, _, rows = part.partition("\n")
        if rows.count("\n") < LONG or part not in shown:
            shown.setdefault(part, parser.prog)
            yield part
        else:
            yield f"{title}\n  as for {shown[part]}"


def _parsers(parser: CommandParser) -> Iterator[CommandParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)
