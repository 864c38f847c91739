"""Measures of the differences between two sets of scores and their rankings (NumPy only)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gpuscore.types.batch import Float64Array

TOP = 10


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute sizes of differences; all 0 if there are no differences."""

    maximum: float
    p99: float
    median: float
    mean: float


@dataclass(frozen=True, slots=True)
class RankedScores:
    """The scores of a set of items by one label, in two runs."""

    name: str
    reference: Float64Array  # [n]
    got: Float64Array  # [n]


@dataclass(frozen=True, slots=True)
class RankAgreement:
    """Agreement of two orders, over all rankings."""

    inversions: int  # among pairs with a clear gap
    clear_pairs: int
    tau: float | None  # smallest Kendall's tau-b of the rankings; None: no ranking
    top: float | None  # smallest overlap of the ten best; None: no ranking of twenty items


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
    """Return log(p / (1 - p)) of log p; a p of 1 counts as the next smaller float64."""
    below_one = np.minimum(log_p, -np.finfo(np.float64).epsneg)
    odds: Float64Array = below_one - np.log(-np.expm1(below_one))
    return odds


def kendall_tau_b(a: Float64Array, b: Float64Array) -> float:
    """Return the rank correlation of two arrays [n] (Kendall 1945); NaN if one is constant.

    (concordant - discordant) / sqrt(pairs not tied in a * pairs not tied in b), over all pairs.
    """
    of_a, of_b = _signs(a), _signs(b)
    untied = float(np.abs(of_a).sum()) * float(np.abs(of_b).sum())
    return float((of_a * of_b).sum() / np.sqrt(untied)) if untied else float("nan")


def top_overlap(reference: Float64Array, got: Float64Array, top: int = TOP) -> float:
    """Return the share of the `top` best of `got` that are among `reference`'s best, ties too."""
    top = min(top, len(reference))
    last = np.sort(reference)[-top]
    best = np.argsort(-got, kind="stable")[:top]
    return float((reference[best] >= last).mean())


def inversions(reference: Float64Array, got: Float64Array, gap: float) -> tuple[int, int]:
    """Count the pairs over `gap` apart in `reference`: first those swapped in `got`, then all."""
    clear = reference[:, None] - reference[None, :] > gap  # [n, n], each pair once
    return int((clear & (got[:, None] < got[None, :])).sum()), int(clear.sum())


def rank(rankings: Iterable[RankedScores], gap: float) -> RankAgreement:
    """Summarise rankings; the order of two scores over `gap` apart is clear."""
    inverted = clear = 0
    taus: list[float] = []
    tops: list[float] = []
    for ranking in rankings:
        wrong, all_clear = inversions(ranking.reference, ranking.got, gap)
        inverted, clear = inverted + wrong, clear + all_clear
        taus.append(kendall_tau_b(ranking.reference, ranking.got))
        if len(ranking.reference) >= 2 * TOP:
            tops.append(top_overlap(ranking.reference, ranking.got))
    return RankAgreement(inverted, clear, _least(taus), _least(tops))


def _signs(values: Float64Array) -> Float64Array:
    return np.sign(values[:, None] - values[None, :])


def _least(agreements: Sequence[float]) -> float | None:
    """Return the smallest number, or None if there is none.

    If one is NaN, so is the result, which fails every gate.
    """
    return float(np.min(agreements)) if agreements else None
