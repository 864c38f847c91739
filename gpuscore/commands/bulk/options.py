"""The command line of `gpuscore batch`, and the options that only this command has."""

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuscore.config import EngineConfig, FileConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.examples import EXAMPLES
from gpuscore.config.flags import EPILOG, add_command, add_flags, add_some_flags
from gpuscore.config.options import common, options
from gpuscore.config.sources import Settings
from gpuscore.errors import ConfigError, UsageError
from gpuscore.models.files import shown

JSON_LINES = "JSON lines"
CSV = "CSV"
PARQUET = "Parquet"
SUFFIXES = {".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".csv": CSV, ".parquet": PARQUET}
FREE = ("input", "output", "max_bad")  # what may change when a job is resumed


@dataclass(frozen=True)
class BatchOptions:
    """Input, output and rows (command line only)."""

    input: str = common("", "a file: .jsonl, .csv or .parquet", metavar="PATH")
    output: str = common(
        "",
        "a file with the input's columns and the scores, in the input's order: .parquet if the "
        "input is Parquet, else .jsonl; it appears when the job is complete. OUTPUT.work keeps the "
        "state until then, OUTPUT.bad.jsonl gets the rows that cannot be scored",
        metavar="PATH",
    )
    max_bad: float = common(
        0.01,
        "exit with code 1 if a larger share of the rows, or all of them, are bad; the output is "
        "written anyway",
        metavar="SHARE",
        minimum=0,
        maximum=1,
    )
    requests: bool = common(
        False,
        "the input's lines are requests with custom_id, method, url and body, as OpenAI's batch "
        "API takes them; the output's lines are their answers",
    )
    query_column: str | None = common(None, "column of the queries", unset="none, no query")
    item_column: str = common("item", "column of the items or documents")
    scores_column: str = common("scores", "column that is added, for the scores")
    labels: str | None = common(
        None,
        "label texts, or names of a classification model's classes; prompts are query + item",
        unset="labels and prompts of the model's family",
        metavar="A,B",
    )
    apply_softmax: bool = common(
        False,
        "softmax over the labels, instead of probabilities over the whole vocabulary, or over all "
        "classes",
    )

    @property
    def target(self) -> Path:
        return Path(self.output)

    @property
    def bad_rows(self) -> Path:
        return Path(f"{self.output}.bad.jsonl")

    @property
    def columns(self) -> list[str]:
        """The columns of the input that are read."""
        return [name for name in (self.query_column, self.item_column) if name is not None]

    def check_columns(self, place: str, names: Collection[str]) -> None:
        """Raise UsageError if a column is missing, or the scores' column exists already."""
        for name in self.columns:
            if name not in names:
                raise UsageError(f"{place} has no column {name}; it has {shown(list(names))}")
        if self.scores_column in names:
            problem = f"{place} has a column {self.scores_column} already"
            raise UsageError(f"{problem}; choose another with --scores-column")

    def identity(self) -> dict[str, Any]:
        """Return the values that must stay the same when a job is resumed, by flag."""
        named = (item for item in options(BatchOptions) if item.name not in FREE)
        return {item.flag: getattr(self, item.name) for item in named}


def read_options(values: argparse.Namespace) -> BatchOptions:
    """Return the command line's options.

    Raises:
        ConfigError: some do not fit together; UsageError for one that is missing or out of range.
    """
    given = {item.name: item for item in options(BatchOptions) if item.name in values}
    for name, item in given.items():
        if problem := item.problem(getattr(values, name)):
            raise UsageError(f"{item.flag} {problem}")
    if not {"input", "output"} <= set(given):
        raise UsageError("--input and --output are required")
    chosen = BatchOptions(**{name: getattr(values, name) for name in given})
    if chosen.requests:
        if others := [item.flag for item in given.values() if item.name not in (*FREE, "requests")]:
            raise ConfigError(f"--requests and {others[0]} exclude each other")
    elif chosen.query_column == chosen.item_column:
        raise ConfigError(f"--query-column and --item-column are both {chosen.item_column}")
    elif chosen.apply_softmax and chosen.labels is None:
        raise ConfigError("--apply-softmax needs --labels")
    return chosen


def add_batch(commands: Any, run: Callable[[argparse.Namespace, Settings], int]) -> None:
    """Add `batch`, which `run` runs, to the parser's commands."""
    parser = add_command(
        commands,
        "batch",
        usage="batch [MODEL] --input PATH --output PATH [OPTIONS]",
        help="score the rows of a file: JSON lines, CSV, Parquet",
        description="Score the rows of a file, and write them to another file.",
        epilog=EXAMPLES["batch"] + EPILOG,
        run=run,
    )
    parser.add_help_all()
    add_flags(parser, BatchOptions)
    add_some_flags(parser, "Prompts", ServerConfig, ("family",))
    add_flags(parser, ModelConfig, RequestLimits, EngineConfig, FileConfig)
