"""The kernel that combines a row's slices of the vocabulary, and the choice of best tokens in one.

A slice has one best token, or MAX_TOP of them in no order, with -inf in places that are left.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.launch import next_power_of_two

BEST_WARPS = 4  # a row has thousands of candidates if several tokens are wanted
NO_ID = tl.constexpr(2**31 - 1)


def top_constants(top: int) -> dict[str, int]:
    """Return the compile-time arguments of kernels that keep this many best tokens.

    TOP_COLUMNS is 0 if the kernels need no lists of best tokens.
    """
    return {"TOP": top, "TOP_COLUMNS": next_power_of_two(top) if top > 1 else 0}


@triton.jit
def no_best(ROWS: tl.constexpr, TOP: tl.constexpr, TOP_COLUMNS: tl.constexpr):
    """Return logits and ids, each [ROWS, TOP_COLUMNS], of rows without any token yet.

    Columns after TOP fill up a power of two. Nothing is larger, so they are never replaced.
    """
    column = tl.arange(0, TOP_COLUMNS)[None, :]
    free = tl.where(column < TOP, float("-inf"), float("inf"))
    top = tl.zeros([ROWS, TOP_COLUMNS], tl.float32) + free
    return top, tl.zeros([ROWS, TOP_COLUMNS], tl.int32) - 1 - column


@triton.jit
def with_best(top, top_ids, logits, peak, first, TOKENS: tl.constexpr, TOP_COLUMNS: tl.constexpr):
    """Replace the least of each row's best tokens by larger ones of a later tile, one at a time.

    Among equal tokens the highest id is replaced first, and a later token never replaces an equal
    token.

    Args:
        top, top_ids: [rows, TOP_COLUMNS], of the tiles so far.
        logits: [rows, TOKENS] of this tile, whose first token is `first`.
        peak: [rows], the largest of them.
    """
    token = tl.arange(0, TOKENS)[None, :]
    least = tl.min(top, axis=1)
    while tl.max((peak > least).to(tl.int32), axis=0) > 0:
        enters = (peak > least)[:, None]
        winner = tl.argmax(logits, axis=1, tie_break_left=True)[:, None]
        leaves = top == least[:, None]
        last = tl.max(tl.where(leaves, top_ids, -TOP_COLUMNS - 1), axis=1)
        leaves = leaves & (top_ids == last[:, None]) & enters
        top = tl.where(leaves, peak[:, None], top)
        top_ids = tl.where(leaves, first + winner, top_ids)
        logits = tl.where((token == winner) & enters, float("-inf"), logits)
        peak = tl.max(logits, axis=1)
        least = tl.min(top, axis=1)
    return top, top_ids


@triton.jit
def merge_slices_kernel(
    peaks,
    sums,
    best_ids,
    best_logits,
    lse,
    top_ids,
    top_logits,
    SLICES: tl.constexpr,
    TOP: tl.constexpr,
    TOP_COLUMNS: tl.constexpr,
):
    """Combine a row's slices, with TOP best tokens each, 0 or more; write the TOP best of all, the
    largest first. A slice without tokens has peak -inf, sum 0."""
    row = tl.program_id(0).to(tl.int64)
    place = row * SLICES + tl.arange(0, SLICES)
    peak = tl.load(peaks + place)
    highest = tl.max(peak, axis=0)
    total = tl.sum(tl.load(sums + place) * tl.exp(peak - highest), axis=0)
    tl.store(lse + row, highest + tl.log(total))
    if TOP > 0:
        column = tl.arange(0, TOP_COLUMNS)[None, :]
        places, inside = place[:, None] * TOP + column, column < TOP
        ids = tl.load(best_ids + places, mask=inside, other=-1)
        logits = tl.load(best_logits + places, mask=inside, other=float("-inf"))
        for rank in range(TOP):
            best = tl.max(tl.max(logits, axis=1), axis=0)
            winner = tl.min(tl.min(tl.where(logits == best, ids, NO_ID), axis=1), axis=0)
            tl.store(top_ids + row * TOP + rank, tl.maximum(winner, 0))  # below 0: no token is left
            tl.store(top_logits + row * TOP + rank, best)
            logits = tl.where(ids == winner, float("-inf"), logits)


@chosen_once
def _launch(slices: int, top: int) -> CachedLaunch:
    constants = {"SLICES": slices, "TOP": top, "TOP_COLUMNS": next_power_of_two(max(1, top))}
    options = {"num_warps": BEST_WARPS if top > 1 else 1}
    return CachedLaunch(merge_slices_kernel, constants, options, dtypes=())


def merge(
    peaks: Tensor,
    sums: Tensor,
    best_ids: Tensor,
    best_logits: Tensor,
    merged: tuple[Tensor, Tensor, Tensor],
    top: int,
) -> None:
    """Write log-sum-exp, best ids and their logits of all rows to `merged`.

    Args:
        peaks, sums: float [rows, slices].
        best_ids, best_logits: of each slice, the same or with a dimension of `top` more.
        top: best tokens per row: 0, 1 or more.
    """
    rows, slices = peaks.shape
    _launch(slices, top)((rows, 1), (peaks, sums, best_ids, best_logits, *merged), ())
