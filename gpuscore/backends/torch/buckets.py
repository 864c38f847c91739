"""Buckets: the batch sizes that have a CUDA graph. A batch runs in the smallest one that holds it.

Token counts grow by at most a half per step, so at most a third of a batch is padding, a fifth on
average. Empty query tiles and scored rows cost little, so their steps are coarse.
"""

from bisect import bisect_left
from dataclasses import dataclass

SMALLEST = 32  # tokens
TILES_STEP, SCORED_STEP = 4, 16
FEW = 16  # query tiles, and scored rows, of the smallest bucket


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The numbers of tokens, tiles and scored rows that one graph holds."""

    tokens: int
    tiles: int  # query tiles over all rows, in one tile table
    scored: int  # scored rows, and query tiles of the last layer


def make_buckets(most_tokens: int, rows_per_tile: int) -> list[Bucket]:
    """All buckets for batches of up to `most_tokens` tokens, sorted; none if that is 0."""
    return [
        Bucket(tokens, tiles, scored)
        for tokens in _tokens(most_tokens)
        for tiles in _steps(max(FEW, 2 * -(-tokens // rows_per_tile)), TILES_STEP, tokens)
        for scored in _steps(FEW, SCORED_STEP, tokens)
    ]


def find_bucket(buckets: list[Bucket], wanted: Bucket) -> Bucket | None:
    """Return the first of the sorted buckets that holds `wanted`, or None."""
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
    """first, first * step, ... and `last`, the most that a batch of `last` tokens can have."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= step
    return [*sizes, last]
