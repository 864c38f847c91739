"""The command line of `gpuscore eval`."""

import argparse
from typing import Any

from gpuscore.config import FileConfig, ModelConfig, ServerConfig
from gpuscore.config.flags import EPILOG, add_command, add_flags, add_some_flags
from gpuscore.config.sources import Settings
from gpuscore.errors import ConfigError
from gpuscore.system.extras import install

EXAMPLES = """\
Examples:

  gpuscore eval demo --data demo
  gpuscore eval Qwen/Qwen3-Reranker-0.6B --data scifact --run bm25.txt --output scifact-eval
  gpuscore eval Qwen/Qwen3-Reranker-0.6B --data queries.jsonl --quantization int8 \\
    --against quantization=auto --margin 0.01
  gpuscore eval http://127.0.0.1:8000 --data queries.jsonl --against http://127.0.0.1:8001

The same command continues an evaluation that was ended. Exit code 1: with --margin, a loss
beyond the margin is not ruled out. Exit code 2: a server or a model gives no scores.

"""


def add_eval(commands: Any) -> None:
    """Add `eval` to the parser's commands."""
    parser = add_command(
        commands,
        "eval",
        "eval [MODEL|URL] --data PATH [--against WHAT] [OPTIONS]",
        "measure how well a model ranks or classifies: nDCG, MRR, accuracy, paired tests",
        "Measure how well a model ranks or classifies, beside other runs.",
        EXAMPLES + EPILOG,
        _eval,
    )
    parser.add_help_all()
    _add_data(parser.add_argument_group("Data (command line only)"))
    _add_comparison(parser.add_argument_group("Comparison and report (command line only)"))
    add_some_flags(parser, "Prompt family", ServerConfig, ("family",))
    add_flags(parser, ModelConfig, FileConfig)


def _add_data(group: Any) -> None:
    group.add_argument(
        "--data",
        required=True,
        metavar="PATH",
        help="JSON lines with query, documents and grades, or with text and label; or a folder in "
        "the layout of BEIR or MTEB; or demo (included in gpuscore)",
    )
    group.add_argument(
        "--split", default="test", metavar="NAME", help="of a folder's qrels (default: test)"
    )
    group.add_argument(
        "--qrels", metavar="FILE", help="judgements for a folder, in TREC's or BEIR's format"
    )
    group.add_argument(
        "--run",
        metavar="FILE",
        help="candidates for a folder, in TREC's run format; they are also compared as the first "
        "stage (default: top_ranked.jsonl, or else the judged documents)",
    )
    group.add_argument(
        "--depth",
        type=int,
        default=100,
        metavar="N",
        help="candidates of a query, the best of the run (default: 100)",
    )
    group.add_argument("--labels", metavar="A,B", help="classes to choose from, for labelled texts")
    group.add_argument(
        "--instruction", metavar="TEXT", help="replaces the instruction of the prompt family"
    )
    group.add_argument(
        "--truncate", action="store_true", help="cut documents that are too long at their end"
    )


def _add_comparison(group: Any) -> None:
    group.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="WHAT",
        help="another MODEL or URL, or setting=value: the same model with another instruction, "
        "family, dtype, quantization, backend or attention; repeat it for several",
    )
    group.add_argument(
        "--measures",
        metavar="NAMES",
        help="of rankings, divided by spaces (default: nDCG@10 MRR@10 MAP recall@10 AUC); the "
        "first one decides",
    )
    group.add_argument(
        "--margin",
        type=float,
        metavar="X",
        help="exit with 1 unless a loss of more than this against each other run is ruled out",
    )
    group.add_argument(
        "--price", type=float, metavar="X", help="of an hour of the machine, for the cost"
    )
    group.add_argument(
        "--output",
        default="eval.out",
        metavar="FOLDER",
        help="folder for scores, report.html, report.json and queries.csv (default: eval.out)",
    )
    group.add_argument("--restart", action="store_true", help="score again what FOLDER has")
    group.add_argument(
        "--concurrency", type=int, default=4, metavar="N", help="queries at a time (default: 4)"
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of resampling (default: 0)"
    )


def _eval(values: argparse.Namespace, settings: Settings) -> int:
    try:
        from gpuscore.measure.evaluation.command import evaluate
    except ModuleNotFoundError as error:
        if error.name not in ("scipy", "ir_measures"):
            raise
        needed = f"gpuscore eval needs {error.name}: {install('eval')}"
        raise ConfigError(needed) from error
    return evaluate(values, settings)
