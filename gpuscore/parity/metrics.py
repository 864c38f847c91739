"""Measures of the differences between two sets of scores and their rankings (NumPy only)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gpuscore.arrays import Float64Array

TOP = 10


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute sizes of differences; all 0 if there are no differences."""

    maximum: float
    p99: float
    median: float
    mean: float


@dataclass(frozen=True, slots=True)
class RankAgreement:
    """Agreement of two orders, over all sets of items that are ranked by one label."""

    inversions: int  # among pairs with a clear gap
    clear_pairs: int
    tau: float | None  # smallest Kendall's tau-b of the sets; None: no set
    top: float | None  # smallest overlap of the ten best; None: no set of twenty items
    clear_tau: float | None  # as tau, of the sets that are not degenerate
    clear_top: float | None


def errors(differences: Float64Array) -> Errors:
    """Summarise differences of any shape; NaN counts as infinite, so that no gate accepts it."""
    sizes = np.abs(differences).ravel()
    sizes = np.where(np.isnan(sizes), np.inf, sizes)
    if not sizes.size:
        return Errors(0.0, 0.0, 0.0, 0.0)
    # "higher" picks a size from the data; interpolation between a number and infinity gives NaN.
    p99, median = (float(np.percentile(sizes, q, method="higher")) for q in (99, 50))
    return Errors(float(sizes.max()), p99, median, float(sizes.mean()))


def log_odds(log_p: Float64Array) -> Float64Array:
    """Return log(p / (1 - p)) of log-probabilities; of a probability of 1 that of the next less."""
    below_one = np.minimum(log_p, -np.finfo(np.float64).epsneg)
    odds: Float64Array = below_one - np.log(-np.expm1(below_one))
    return odds


def kendall_tau_b(a: Float64Array, b: Float64Array) -> float:
    """Return the rank correlation of two [n] (Kendall 1945), -1 to 1; NaN if one is constant.

    (concordant - discordant) / sqrt(pairs not tied in a * pairs not tied in b), over all pairs.
    """
    of_a, of_b = _signs(a), _signs(b)
    untied = float(np.abs(of_a).sum()) * float(np.abs(of_b).sum())
    return float((of_a * of_b).sum() / np.sqrt(untied)) if untied else float("nan")


def top_overlap(want: Float64Array, got: Float64Array, top: int = TOP) -> float:
    """Return the share of the `top` best of `got` that `want` has among its best or ties them."""
    top = min(top, len(want))
    last = np.sort(want)[-top]
    best = np.argsort(-got, kind="stable")[:top]
    return float((want[best] >= last).mean())


def inversions(want: Float64Array, got: Float64Array, gap: float) -> tuple[int, int]:
    """Return the number of pairs over `gap` apart in `want` that `got` swaps, and of all such."""
    clear = want[:, None] - want[None, :] > gap  # [n, n], each pair once
    return int((clear & (got[:, None] < got[None, :])).sum()), int(clear.sum())


def rank(
    sets: Iterable[tuple[Float64Array, Float64Array]], gap: float, noise: float, ties: float
) -> RankAgreement:
    """Summarise the rank agreement of several sets.

    Args:
        sets: (want [n], got [n]) of each set.
        gap: the order of two scores further apart than this is clear.
        noise: two scores no further apart than this count as tied.
        ties: a set with a larger share of tied pairs is degenerate: its order means nothing.
    """
    inverted = clear = 0
    taus: list[float] = []
    tops: list[float] = []
    clear_taus: list[float] = []
    clear_tops: list[float] = []
    for want, got in sets:
        wrong, all_clear = inversions(want, got, gap)
        inverted, clear = inverted + wrong, clear + all_clear
        tau = [kendall_tau_b(want, got)]
        top = [top_overlap(want, got)] if len(want) >= 2 * TOP else []
        taus += tau
        tops += top
        if near_ties(want, noise) <= ties:
            clear_taus += tau
            clear_tops += top
    return RankAgreement(inverted, clear, *map(_least, (taus, tops, clear_taus, clear_tops)))


def near_ties(values: Float64Array, noise: float) -> float:
    """Return the share of all pairs that are no more than `noise` apart."""
    near = np.abs(values[:, None] - values[None, :]) <= noise
    n = len(values)
    return float((near.sum() - n) / max(1, n * (n - 1)))


def _signs(values: Float64Array) -> Float64Array:
    return np.sign(values[:, None] - values[None, :])


def _least(found: Sequence[float]) -> float | None:
    """Return the smallest number, None without any; NaN if there is one, which fails every gate."""
    return float(np.min(found)) if found else None
