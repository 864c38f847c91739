"""The flags that name labels, which `gpuscore score` and `gpuscore batch` have in common."""

import argparse
import math
from contextlib import suppress
from typing import Any

from gpuscore.errors import UsageError


def add_label_flags(group: Any, *, required: bool, default: str = "") -> None:
    """Add the flags that name labels, and those that say what a score is.

    Args:
        group: of the parser.
        required: one of the first two must be given.
        default: said of --labels.
    """
    either = group.add_mutually_exclusive_group(required=required)
    either.add_argument(
        "--labels",
        metavar="A,B",
        help=f"label texts, or names of a classification model's classes{default}",
    )
    either.add_argument(
        "--label-sequences",
        type=label_sequences,
        metavar="IDS,IDS",
        help="labels as token ids, with spaces between those of one label: '12 7,9'",
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


def check_softmax(values: argparse.Namespace) -> None:
    """Raise UsageError for a temperature without a softmax."""
    if values.temperature != 1 and not values.apply_softmax:
        raise UsageError("--temperature needs --apply-softmax")


def _temperature(text: str) -> float:
    with suppress(ValueError):
        number = float(text)
        if 0 < number < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text} is not a positive, finite number")


def label_sequences(text: str) -> tuple[tuple[int, ...], ...]:
    """Read sequences of token ids; an argparse type."""
    words = [label.split() for label in text.split(",")]
    if not all(word.isascii() and word.isdecimal() for label in words for word in label):
        raise argparse.ArgumentTypeError("must be token ids, such as '12 7,9'")
    return tuple(tuple(map(int, label)) for label in words)


def shown_sequences(sequences: tuple[tuple[int, ...], ...]) -> str:
    """Write sequences as --label-sequences takes them."""
    return ",".join(" ".join(map(str, ids)) for ids in sequences)
