"""The command line of `gpuscore calibrate`."""

import argparse
from pathlib import Path
from typing import Any

from gpuscore.config import FileConfig, ModelConfig, ServerConfig
from gpuscore.config.flags import EPILOG, add_command, add_flags, add_some_flags
from gpuscore.config.sources import Settings

EXAMPLES = """\
Examples:

  gpuscore calibrate Qwen/Qwen3-0.6B --data labelled.jsonl
  gpuscore calibrate Qwen/Qwen3-0.6B --data labelled.jsonl --bias \\
    --output calibration.json --diagram reliability.svg

`gpuscore serve --calibration calibration.json` applies it. A row of the data is a body of
/v1/systemone with the right answers:

  {"state": "...", "questions": {"spam": {"type": "noul", "instructions": "Is it spam?"}},
   "answers": {"spam": true}}

An answer is true or false, a name of a choice, or the number of a level. Exit code 1: the
data has bad rows, which are named, or the model cannot answer.

"""


def add_calibrate(commands: Any) -> None:
    """Add `calibrate` to the parser's commands."""
    parser = add_command(
        commands,
        "calibrate",
        "calibrate [MODEL] --data FILE [OPTIONS]",
        "fit the probabilities of typed questions to labelled ones",
        "Fit how probabilities of typed questions are made, on labelled ones.",
        EXAMPLES + EPILOG,
        _calibrate,
    )
    parser.add_help_all()
    group = parser.add_argument_group("Data and output (command line only)")
    group.add_argument(
        "--data", required=True, type=Path, metavar="FILE", help="JSON lines of labelled questions"
    )
    group.add_argument(
        "--output",
        type=Path,
        default=Path("calibration.json"),
        metavar="FILE",
        help="what `serve --calibration` reads (default: calibration.json)",
    )
    group.add_argument(
        "--diagram",
        type=Path,
        default=Path("reliability.svg"),
        metavar="FILE",
        help="the reliability diagram (default: reliability.svg)",
    )
    group.add_argument(
        "--bias",
        action="store_true",
        help="also fit a bias for each place in the list of options",
    )
    group.add_argument(
        "--folds",
        type=_folds,
        default=5,
        metavar="N",
        help="parts of the rows for cross-validation (default: 5)",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the parts and resamples (default: 0)"
    )
    add_some_flags(parser, "Prompts", ServerConfig, ("decision_order",))
    add_flags(parser, ModelConfig, FileConfig)


def _folds(text: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if not 2 <= number <= 100:
        raise argparse.ArgumentTypeError("must be a number from 2 to 100")
    return number


def _calibrate(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.measure.calibrate.command import calibrate

    return calibrate(values, settings)
