"""The shapes of batches that have a CUDA graph of their own; a batch runs in the smallest it fits.

Tokens come in steps of at most a half, so that at most a third of a batch is padding, a fifth on
average. Query tiles and scored rows cost little when they are empty, so their steps are coarse.
"""

from bisect import bisect_left
from dataclasses import dataclass

SMALLEST = 32  # tokens
TILES_STEP, SCORED_STEP = 4, 16
FEW = 16  # query tiles, and scored rows, of the smallest


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """How much there is room for."""

    tokens: int
    tiles: int  # of all rows, for layers with one window
    scored: int  # rows, and tiles of the last layer


def make_buckets(most_tokens: int, rows_per_tile: int) -> list[Bucket]:
    """All of them, for batches of up to `most_tokens`; none where that is 0."""
    return [
        Bucket(tokens, tiles, scored)
        for tokens in _tokens(most_tokens)
        for tiles in _steps(max(FEW, 2 * -(-tokens // rows_per_tile)), TILES_STEP, tokens)
        for scored in _steps(FEW, SCORED_STEP, tokens)
    ]


def find_bucket(buckets: list[Bucket], wanted: Bucket) -> Bucket | None:
    """The first of the sorted buckets with room for all; None if there is none."""
    start = bisect_left(buckets, Bucket(wanted.tokens, 0, 0))
    for bucket in buckets[start:]:
        if bucket.tiles >= wanted.tiles and bucket.scored >= wanted.scored:
            return bucket
    return None


def _tokens(most: int) -> list[int]:
    """32, 48, 64, 96, 128, ..., and `most` itself."""
    sizes, size = [], SMALLEST
    while size < most:
        sizes.append(size)
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return [*sizes, most] if most else []


def _steps(first: int, step: int, last: int) -> list[int]:
    """first, first * step, ... and `last`, which is what a batch of so many tokens has at most."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= step
    return [*sizes, last]
