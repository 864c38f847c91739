"""The command line of `gpuscore batch`."""

import argparse
from typing import Any

from gpuscore.commands.bulk.options import DEFAULT_MAX_BAD, DEFAULT_SCORES_COLUMN
from gpuscore.config import EngineConfig, FileConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.flags import (
    EPILOG,
    CommandParser,
    HelpFormatter,
    add_flags,
    add_label_flags,
    add_some_flags,
    refuse_api_key,
)
from gpuscore.config.sources import Settings

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


def add_batch(commands: Any) -> None:
    """Add `batch` to the parser's commands."""
    parser: CommandParser = commands.add_parser(
        "batch",
        usage="gpuscore batch [MODEL] --input PATH --output PATH [OPTIONS]",
        description="Score the rows of files; files in, files out.",
        help="score the rows of files: JSON lines, CSV, Parquet",
        epilog=EXAMPLES + EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(command=_batch)
    refuse_api_key(parser)
    parser.add_help_all()
    _add_files(parser.add_argument_group("Input and output (command line only)"))
    _add_rows(parser.add_argument_group("Rows (command line only)"))
    _add_ray(parser.add_argument_group("Cluster (command line only)"))
    asked = ("family", "decision_order", "calibration")
    add_some_flags(parser, "Prompts", ServerConfig, asked)
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
    own = "; prompts are query + item (default: those of the model's prompt family, in its prompts)"
    add_label_flags(group, required=False, default=own)
    group.add_argument("--item-first", action="store_true", help="prompts are item + query")
    group.add_argument(
        "--instruction", metavar="TEXT", help="replaces the instruction of the prompt family"
    )


def _add_ray(group: Any) -> None:
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="engines run in actors on the nodes of a Ray cluster: auto, HOST:PORT of its GCS, or "
        "ray://HOST:PORT; needs gpuscore[ray] on every node (default: on this machine)",
    )
    group.add_argument(
        "--ray-actors",
        type=_count,
        metavar="N",
        help="number of actors with one engine each; those for which there is no room yet join "
        "later (default: as many as the nodes have GPUs or, on CPUs, --threads CPUs for)",
    )


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:  # true of NaN, too
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return share


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _batch(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.commands.bulk.command import batch

    return batch(values, settings)
