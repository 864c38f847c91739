"""The options of a batch job that no other command has."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuscore.config.flags import check_softmax, shown_sequences
from gpuscore.errors import ConfigError, UsageError

DEFAULT_SCORES_COLUMN, DEFAULT_MAX_BAD = "scores", 0.01
JSON_LINES, CSV, PARQUET = "JSON lines", "CSV", "Parquet"
SUFFIXES = {".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".csv": CSV, ".parquet": PARQUET}
DEFAULT_ITEM_COLUMN = "item"
SHOWN_NAMES = 20


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The options of one job.

    Attributes:
        query_column: None: every query is empty.
        labels: None: those of the model's prompt family, or all its classes, unless there are
            `label_sequences`.
        requests: the input's lines are requests to the HTTP API.
        strict: the first bad row ends the job.
        scores_column: the column that is added.
        max_bad: the largest share of bad rows of a job that counts as done.
    """

    input: Path
    output: Path
    query_column: str | None = None
    item_column: str = DEFAULT_ITEM_COLUMN
    labels: tuple[str, ...] | None = None
    label_sequences: tuple[tuple[int, ...], ...] | None = None
    label_length_normalization: str = "none"
    apply_softmax: bool = False
    temperature: float = 1.0
    item_first: bool = False
    instruction: str | None = None
    requests: bool = False
    strict: bool = False
    scores_column: str = DEFAULT_SCORES_COLUMN
    max_bad: float = DEFAULT_MAX_BAD

    @property
    def output_format(self) -> str:
        return SUFFIXES[self.output.suffix]

    @property
    def bad_rows(self) -> Path:
        return self.output.with_name(f"{self.output.name}.bad.jsonl")

    @property
    def has_labels(self) -> bool:
        """True if the job names labels of its own."""
        return self.labels is not None or self.label_sequences is not None

    @property
    def columns(self) -> list[str]:
        """The columns that are read, those of the text that prompts begin with first."""
        columns = [self.item_column] if self.query_column is None else []
        if self.query_column is not None:
            columns = [self.query_column, self.item_column]
        return columns[::-1] if self.item_first else columns

    def check_columns(self, place: str, names: Iterable[str]) -> None:
        """Raise UsageError if a column that is read is missing, or the scores' name is taken."""
        found = list(names)
        for name in self.columns:
            if name not in found:
                raise UsageError(f"{place} has no column {name}; it has {shown_names(found)}")
        if self.scores_column in found:
            raise UsageError(f"{place} has a column {self.taken}")

    @property
    def taken(self) -> str:
        """The end of an error about a column of the scores' name."""
        return f"{self.scores_column} already; --scores-column names another"

    def identity(self) -> dict[str, Any]:
        """Return the flags that a resumed run must repeat, by name."""
        sequences = self.label_sequences
        return {
            "--query-column": self.query_column,
            "--item-column": self.item_column,
            "--labels": None if self.labels is None else ",".join(self.labels),
            "--label-sequences": sequences and shown_sequences(sequences),
            "--label-length-normalization": self.label_length_normalization,
            "--apply-softmax": self.apply_softmax,
            "--temperature": self.temperature,
            "--item-first": self.item_first,
            "--instruction": self.instruction,
            "--requests": self.requests,
            "--scores-column": self.scores_column,
        }


def shown_names(names: Sequence[str]) -> str:
    """Return the first names, in one line."""
    shown = [name if name.isprintable() else repr(name) for name in names[:SHOWN_NAMES]]
    more = len(names) - SHOWN_NAMES
    return ", ".join([*shown, f"and {more} more"] if more > 0 else shown)


def read_options(values: argparse.Namespace) -> BatchOptions:
    """Return the command line's options.

    Raises:
        ConfigError: options that do not fit together.
    """
    check_softmax(values)
    labels = None if values.labels is None else tuple(values.labels.split(","))
    item_column = values.item_column
    options = BatchOptions(
        input=Path(values.input),
        output=Path(values.output),
        query_column=values.query_column,
        item_column=DEFAULT_ITEM_COLUMN if item_column is None else item_column,
        labels=labels,
        label_sequences=values.label_sequences,
        label_length_normalization=values.label_length_normalization,
        apply_softmax=values.apply_softmax,
        temperature=values.temperature,
        item_first=values.item_first,
        instruction=values.instruction,
        requests=values.requests,
        strict=values.strict,
        scores_column=values.scores_column or DEFAULT_SCORES_COLUMN,
        max_bad=values.max_bad,
    )
    check(options, item_column is not None)
    return options


def check(options: BatchOptions, names_items: bool = True) -> None:
    """Raise ConfigError for options that do not fit together."""
    if options.output.suffix not in {".jsonl", ".parquet"}:
        raise ConfigError(f"--output {options.output}: the name must end with .jsonl or .parquet")
    if options.requests:
        _check_requests(options, names_items)
        return
    if options.query_column == options.item_column:
        raise ConfigError(f"--query-column and --item-column are both {options.item_column}")
    if not options.has_labels:
        if options.label_length_normalization != "none":
            raise ConfigError("--label-length-normalization needs --labels or --label-sequences")
        for flag in ("apply_softmax", "item_first"):
            if getattr(options, flag):
                raise ConfigError(f"--{flag.replace('_', '-')} needs --labels")
    elif options.instruction is not None:
        raise ConfigError("--instruction is for prompt families, without --labels")


def _check_requests(options: BatchOptions, names_items: bool) -> None:
    given = {
        "--query-column": options.query_column,
        "--item-column": names_items,
        "--labels": options.labels,
        "--label-sequences": options.label_sequences,
        "--label-length-normalization": options.label_length_normalization != "none",
        "--apply-softmax": options.apply_softmax,
        "--item-first": options.item_first,
        "--instruction": options.instruction,
        "--scores-column": options.scores_column != DEFAULT_SCORES_COLUMN,
    }
    for flag, value in given.items():
        if value:
            raise ConfigError(f"--requests excludes {flag}: each line says what it asks for")
    if options.output_format != JSON_LINES:
        raise ConfigError(f"--output {options.output}: answers to requests are JSON lines (.jsonl)")
