"""The progress bars of a batch job, on standard error if that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from gpuscore.commands.bulk.feeding import CountedRows


class Progress:
    """The bars of one run.

    Attributes:
        prompt_tokens: of all prompts scored by this run, each counted as a whole.
        computed_tokens: those of them that were computed; the others were shared or cached.
        rows: rows that this run has scored or found bad.
    """

    def __init__(self, shown: bool = True) -> None:
        self.rows = 0
        self.prompt_tokens = self.computed_tokens = 0
        self._disable = None if shown else True  # None: unless it is no terminal

    @property
    def cache_share(self) -> float:
        """Share of the prompts' tokens that were not computed again."""
        if not self.prompt_tokens:
            return 0.0
        return max(0.0, 1 - self.computed_tokens / self.prompt_tokens)

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        with self._bar("reading", None) as bar:
            yield lambda rows: bar.update(rows) and None

    @contextmanager
    def scoring(self, rows: int, done: int) -> Iterator[Callable[[CountedRows], None]]:
        """Show rows, rate, time left and the share of tokens that were not computed again."""
        with self._bar("scoring", rows, done) as bar:

            def report(counted: CountedRows) -> None:
                self.prompt_tokens += counted.prompt_tokens
                self.computed_tokens += counted.computed_tokens
                bar.set_postfix_str(f"cached {self.cache_share:.0%}", refresh=False)
                bar.update(counted.rows)

            yield report

    @contextmanager
    def writing(self, rows: int) -> Iterator[Callable[[int], None]]:
        with self._bar("writing", rows) as bar:
            yield lambda rows: bar.update(rows) and None

    def _bar(self, name: str, rows: int | None, done: int = 0) -> "tqdm[None]":
        return tqdm(total=rows, initial=done, desc=name, unit="row", disable=self._disable)
