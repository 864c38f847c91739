"""The reference page of the command line: the --help text of every command."""

import argparse
import os
from collections.abc import Iterator

from generate.markdown import block, page
from gpuscore.cli import make_parser

COLUMNS = "92"


def page_of_commands() -> str:
    os.environ["COLUMNS"] = COLUMNS  # argparse reads it each time
    blocks = []
    for parser in _parsers(make_parser()):
        blocks += [f"## {parser.prog}", block("text", parser.format_help())]
    return page(
        "Command line",
        "This page shows the `--help` text of every command. [Settings](settings.md) explains "
        "every setting, with its environment variable.",
        *blocks,
        "## Exit codes",
        "`0`: done. `1`: the command, a gate or a check failed. `2`: wrong usage. `70`: the engine "
        "failed five times in a row or never became ready. `75`: the model was not ready within "
        "`--load-timeout`. `78`: a configuration or a model that cannot be served. 128 + the "
        "signal's number: a stop that left requests unfinished.",
    )


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)
