"""The flags that name labels, which `gpuscore score` and `gpuscore batch` have in common."""

import argparse
from typing import Any


def add_label_flags(group: Any, *, required: bool, default: str = "") -> None:
    """Add --labels, --label-sequences and --label-length-normalization.

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


def label_sequences(text: str) -> tuple[tuple[int, ...], ...]:
    """Read sequences of token ids; an argparse type."""
    words = [label.split() for label in text.split(",")]
    if not all(word.isascii() and word.isdecimal() for label in words for word in label):
        raise argparse.ArgumentTypeError("must be token ids, such as '12 7,9'")
    return tuple(tuple(map(int, label)) for label in words)


def shown_sequences(sequences: tuple[tuple[int, ...], ...]) -> str:
    """Write sequences as --label-sequences takes them."""
    return ",".join(" ".join(map(str, ids)) for ids in sequences)
