"""The parser of a command: help in two lengths, and the closest flag to a misspelt one."""

import argparse
import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpuscore.config.fields import RARE

ALL = "--help-all"


class CommandParser(argparse.ArgumentParser):
    """A parser whose --help leaves out the settings of RARE; --help-all shows them.

    Attributes:
        every: the help shows all settings.
    """

    def __init__(self, **words: Any) -> None:
        super().__init__(**({"allow_abbrev": False} | words))
        self.every = False

    def add_help_all(self) -> None:
        """Add --help-all, for a command that has settings of RARE."""
        self.add_argument(ALL, action=_HelpAll, nargs=0, help="show all options, the rare ones too")

    def format_help(self) -> str:
        with self._hidden():
            return super().format_help()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; exit with a usage error for words that are not known, here and not in `main`.

        The error shows a flag without what follows it, which may be a secret.
        """
        values, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            self.error(self._there_is_no(flags[0]) if flags else f"{unknown[0]} is one too many")
        return values, unknown

    def _there_is_no(self, flag: str) -> str:
        known = [
            name
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for name in action.option_strings
            if name.startswith("--")
        ]
        close = difflib.get_close_matches(flag, known, n=1)
        nearest = f"did you mean {close[0]}? " if close else ""
        shown = ALL if ALL in known else "--help"
        return f"there is no {flag}; {nearest}`{self.prog} {shown}` shows all"

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        rare = [] if self.every else [one for one in self._actions if one.dest in RARE]
        before = [one.help for one in rare]
        for one in rare:
            one.help = argparse.SUPPRESS
        try:
            yield
        finally:
            for one, text in zip(rare, before, strict=True):
                one.help = text


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, CommandParser)  # noqa: S101
        parser.every = True
        parser.print_help()
        parser.exit()
