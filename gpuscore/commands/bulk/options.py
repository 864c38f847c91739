"""The command line of `gpuscore batch`, and the options that no other command has."""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from gpuscore.config import EngineConfig, FileConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.flags import (
    EPILOG,
    add_command,
    add_flags,
    add_some_flags,
)
from gpuscore.config.sources import Settings
from gpuscore.errors import ConfigError, UsageError

DEFAULT_SCORES_COLUMN, DEFAULT_MAX_BAD = "scores", 0.01
JSON_LINES, CSV, PARQUET = "JSON lines", "CSV", "Parquet"
SUFFIXES = {".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".csv": CSV, ".parquet": PARQUET}
DEFAULT_ITEM_COLUMN = "item"
SHOWN_NAMES = 20
FREE = ("input", "output", "strict", "max_bad")  # what a run that goes on may have otherwise
EXAMPLES = """\
Examples:

  gpuscore batch Qwen/Qwen3-0.6B --input pairs.parquet --output scored.parquet \\
    --query-column query --item-column item --labels yes,no
  gpuscore batch Qwen/Qwen3-Reranker-0.6B --input pairs.jsonl --output scored.jsonl \\
    --query-column query --item-column document
  gpuscore batch Qwen/Qwen3-0.6B --input requests.jsonl --output answers.jsonl --requests

The same command continues a job that was ended. Exit code 1: a label is not valid, or
all rows or more than --max-bad of them are bad, or with --strict one. Exit code 2: the
input has no such column.

"""


# A row as an object, and the texts of its columns; a str is the reason why it is bad.
Decoded: TypeAlias = dict[str, Any] | str
Texts: TypeAlias = tuple[str, ...] | str


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The options of one job.

    Attributes:
        query_column: None: every query is empty.
        labels: None: the labels of the model's prompt family, or all its classes, unless there are
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
        """The columns that are read; the first holds the text that prompts begin with."""
        columns = [name for name in (self.query_column, self.item_column) if name is not None]
        return columns[::-1] if self.item_first else columns

    def check_columns(self, place: str, names: Iterable[str]) -> None:
        """Raise UsageError if a column that is read is missing, or the scores' name is taken."""
        present = list(names)
        for name in self.columns:
            if name not in present:
                raise UsageError(f"{place} has no column {name}; it has {shown_names(present)}")
        if self.scores_column in present:
            raise UsageError(f"{place} has a column {self.taken}")

    def texts_of(self, row: Decoded) -> Texts:
        """Return the texts of a row's columns, or what is wrong with it."""
        if isinstance(row, str):
            return row
        if self.scores_column in row:
            return f"there is a field {self.taken}"
        for name in self.columns:
            if name not in row:
                return f"there is no field {name}"
            if not isinstance(row[name], str):
                return f"{name} is {kind_of(row[name])}, not text"
        return tuple(row[name] for name in self.columns)

    @property
    def taken(self) -> str:
        """The end of an error about a row that has the column which is added."""
        return f"{self.scores_column} already; --scores-column names another"

    def identity(self) -> dict[str, Any]:
        """Return the flags that a resumed run must repeat, by name."""
        names = (item.name for item in fields(self) if item.name not in FREE)
        values = {name: getattr(self, name) for name in names}
        if self.labels is not None:
            values["labels"] = ",".join(self.labels)
        if self.label_sequences:
            sequences = (" ".join(map(str, ids)) for ids in self.label_sequences)
            values["label_sequences"] = ",".join(sequences)
        return {_flag(name): value for name, value in values.items()}


def kind_of(value: object) -> str:
    """Name the type of a value of JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names = {int: "a number", float: "a number", str: "text", list: "an array", dict: "an object"}
    return names[type(value)]


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
    if values.temperature != 1 and not values.apply_softmax:
        raise UsageError("--temperature needs --apply-softmax")
    arguments = {item.name: getattr(values, item.name) for item in fields(BatchOptions)}
    arguments |= {"input": Path(values.input), "output": Path(values.output)}
    if values.labels is not None:
        arguments["labels"] = tuple(values.labels.split(","))
    if values.item_column is None:
        del arguments["item_column"]
    if not values.scores_column:
        del arguments["scores_column"]
    options = BatchOptions(**arguments)
    _check(options)
    return options


def _check(options: BatchOptions) -> None:
    """Raise ConfigError for options that do not fit together."""
    if options.output.suffix not in {".jsonl", ".parquet"}:
        raise ConfigError(f"--output {options.output}: the name must end with .jsonl or .parquet")
    if options.requests:
        _check_requests(options)
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


def _check_requests(options: BatchOptions) -> None:
    """Raise ConfigError for an option whose value each line has itself."""
    for item in fields(options):
        same = getattr(options, item.name) == item.default
        if not same and item.name not in (*FREE, "requests"):
            raise ConfigError(
                f"--requests excludes {_flag(item.name)}: each line says what it asks for"
            )
    if options.output_format != JSON_LINES:
        raise ConfigError(f"--output {options.output}: answers to requests are JSON lines (.jsonl)")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_batch(commands: Any, run: Callable[[argparse.Namespace, Settings], int]) -> None:
    """Add `batch`, which `run` runs, to the parser's commands."""
    parser = add_command(
        commands,
        "batch",
        "batch [MODEL] --input PATH --output PATH [OPTIONS]",
        "score the rows of files: JSON lines, CSV, Parquet",
        "Score the rows of files; files in, files out.",
        EXAMPLES + EPILOG,
        run,
    )
    parser.add_help_all()
    _add_files(parser.add_argument_group("Input and output (command line only)"))
    _add_rows(parser.add_argument_group("Rows (command line only)"))
    add_some_flags(parser, "Prompts", ServerConfig, ("family",))
    add_flags(parser, ModelConfig, RequestLimits, EngineConfig, FileConfig)


def _add_files(group: Any) -> None:
    group.add_argument(
        "--input",
        required=True,
        metavar="PATH",
        help="a file (.jsonl, .csv or .parquet), or a folder of files of one format",
    )
    group.add_argument(
        "--output",
        required=True,
        metavar="PATH",
        help="a file (.jsonl or .parquet) with the input's columns and the scores, in the input's "
        "order; it appears when the job is complete. OUTPUT.work keeps the state until then, "
        "OUTPUT.bad.jsonl gets the rows that cannot be scored",
    )
    group.add_argument("--strict", action="store_true", help="end at the first bad row")
    group.add_argument(
        "--max-bad",
        type=_share,
        default=DEFAULT_MAX_BAD,
        metavar="SHARE",
        help="exit code 1 if all rows, or a larger share of them, are bad; the output is written "
        f"all the same (default: {DEFAULT_MAX_BAD})",
    )
    group.add_argument(
        "--requests",
        action="store_true",
        help="the input's lines are requests with custom_id, method, url and body, as OpenAI's "
        "batch API takes them; the output's lines are their answers",
    )


def _add_rows(group: Any) -> None:
    group.add_argument(
        "--query-column", metavar="NAME", help="column of the queries (default: none, no query)"
    )
    group.add_argument(
        "--item-column", metavar="NAME", help="column of the items or documents (default: item)"
    )
    group.add_argument(
        "--scores-column",
        metavar="NAME",
        help=f"column that is added, for the scores (default: {DEFAULT_SCORES_COLUMN})",
    )
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--labels",
        metavar="A,B",
        help="label texts, or names of a classification model's classes; prompts are query + item "
        "(default: labels and prompts of the model's family)",
    )
    either.add_argument(
        "--label-sequences",
        type=_label_sequences,
        metavar="IDS,IDS",
        help="labels as token ids, with spaces between ids of the same label: '12 7,9'",
    )
    group.add_argument(
        "--label-length-normalization",
        choices=("none", "mean"),
        default="none",
        help="mean: divide the logarithm of a label's probability by its number of tokens",
    )
    group.add_argument(
        "--apply-softmax",
        action="store_true",
        help="softmax over the labels, instead of probabilities over the whole vocabulary, or over "
        "all classes",
    )
    group.add_argument(
        "--temperature",
        type=_temperature,
        default=1.0,
        metavar="NUMBER",
        help="divides the labels' logits; with --apply-softmax only (default: 1)",
    )
    group.add_argument("--item-first", action="store_true", help="prompts are item + query")
    group.add_argument(
        "--instruction", metavar="TEXT", help="replaces the instruction of the prompt family"
    )


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:  # true of NaN, too
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return share


def _temperature(text: str) -> float:
    with suppress(ValueError):
        number = float(text)
        if 0 < number < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text} is not a positive, finite number")


def _label_sequences(text: str) -> tuple[tuple[int, ...], ...]:
    """Read sequences of token ids; an argparse type."""
    words = [label.split() for label in text.split(",")]
    if not all(word.isascii() and word.isdecimal() for label in words for word in label):
        raise argparse.ArgumentTypeError("must be token ids, such as '12 7,9'")
    return tuple(tuple(map(int, label)) for label in words)
