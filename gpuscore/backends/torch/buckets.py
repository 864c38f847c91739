"""Buckets: the batch sizes that have a CUDA graph. A batch runs in the smallest one that holds it.

Padding is at most 12 % of a bucket from 128 tokens on, and at most 8 % from 500 tokens on. Smaller
buckets grow by at most a half, so padding is at most a third of them.

Each number of tokens is captured with a few numbers of tiles and scored rows:

- Query tiles. An empty one is a thread block that finds nothing to do, in every layer. Tokens that
  fill n tiles need at most 2 n, and each request adds up to two, for its query and its items.
- Scored rows. A padding row costs a row of the last layer only.
- More than `FEW` requests have more than `FEW` scored rows, so room for many tiles comes with room
  for many scored rows. Many chunks without a scored row run there too, and waste that room.
- Over `MANY_FROM` tokens, empty tiles and padding rows cost little. So there are fewer numbers of
  tiles and scored rows, and more numbers of tokens.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gpuscore.types.batch import PackedBatch, Prefix, Segment, pack

SMALLEST = 32  # tokens
FINE_FROM = 128  # tokens
FINE_STEP = 8  # tokens
MANY_FROM = 500  # tokens
FEW = 16  # query tiles, and scored rows, of the smallest bucket
TILES_STEP = 4
SCORED_PART = 4


class Bucket(NamedTuple):
    """The numbers of tokens, tiles and scored rows that one graph holds.

    A named tuple, because every batch is compared with several buckets while the device waits.
    """

    tokens: int
    tiles: int  # query tiles over all rows, in one tile table
    scored: int  # scored rows, and query tiles of the last layer


def make_buckets(most_tokens: int, rows_per_tile: int) -> list[Bucket]:
    """Return all buckets for batches of up to `most_tokens` tokens, sorted; none if that is 0."""
    return [
        Bucket(tokens, tiles, scored)
        for tokens in _tokens(most_tokens)
        for tiles, scored in _tiles_and_scored(tokens, rows_per_tile)
    ]


def find_bucket(buckets: list[Bucket], sizes: Bucket) -> Bucket | None:
    """Return the first of the sorted buckets that holds `sizes`, or None."""
    for index in range(bisect_left(buckets, Bucket(sizes.tokens, 0, 0)), len(buckets)):
        bucket = buckets[index]
        if bucket.tiles >= sizes.tiles and bucket.scored >= sizes.scored:
            return bucket
    return None


def _tokens(most: int) -> list[int]:
    """Return 32, 48, 64, 96, 128, 144, 160, 176, 200, ..., and `most` itself."""
    sizes = []
    size = SMALLEST
    while size < most:
        sizes.append(size)
        size = _next(size)
    return [*sizes, most] if most else []


def _next(size: int) -> int:
    """Return the next larger number of tokens that has a bucket, if batches may be so large."""
    if size >= FINE_FROM:
        # A batch that is one token too large for `size` has the most padding: this per cent.
        padding = 12 if size < MANY_FROM else 8
        most = 100 * (size + 1) // (100 - padding)
        return most // FINE_STEP * FINE_STEP
    return size + (1 << (size.bit_length() - 2))  # by a half or a third, to 2**n or 1.5 * 2**n


def _tiles_and_scored(tokens: int, rows_per_tile: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of tiles and scored rows that are captured with a number of tokens.

    The last are `tokens` of both, the most that any batch has.
    """
    scored = sorted({min(FEW, tokens), tokens})
    full = -(-tokens // rows_per_tile)
    first = max(FEW, 2 * full)
    smaller = 0
    if tokens > MANY_FROM:
        first = max(first, full + 2 * FEW)
        some = tokens // SCORED_PART
        yield from sorted({(min(first, tokens), FEW), (min(2 * first, tokens), some)})
        yield tokens, tokens
        return
    for tiles in _tiles(first, tokens):
        enough = smaller >= first + 2 * FEW  # few requests fit the next smaller number of tiles
        yield from ((tiles, rows) for rows in scored if rows > FEW or not enough)
        smaller = tiles


def _tiles(first: int, last: int) -> list[int]:
    """Return first, first * TILES_STEP, ... and `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= TILES_STEP
    return [*sizes, last]


def filled_batch(tokens: int, scored: int, vocab: int, page_size: int) -> PackedBatch:
    """Return a batch of exactly `tokens` random tokens and at most `scored` scored rows.

    The first half is a query, whose first tokens are kept on page 0; the rest are its items.
    """
    rng = np.random.default_rng(0)
    items = min(scored, tokens // 2)
    ids = rng.integers(0, vocab, tokens).astype(np.int32)
    length = tokens // 2 // items if items else 0
    query = tokens - items * length
    slots = np.where(np.arange(query) < page_size, np.arange(query), -1).astype(np.int32)
    segments = [Segment(ids[:query], 0, 0, slots=slots, label_ids=ids[: 0 if items else 1])]
    for start in range(query, tokens, max(1, length)):
        item = ids[start : start + length]
        segments.append(Segment(item, query, 0, parent=0, label_ids=ids[:1]))
    return pack(segments, [Prefix(0, slots[:0])])
