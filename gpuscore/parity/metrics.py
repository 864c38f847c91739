"""How far two sets of scores are apart: errors, and what they do to a ranking (NumPy only)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gpuscore.arrays import Float64Array

TOP = 10


@dataclass(frozen=True, slots=True)
class Errors:
    """Sizes of differences; 0 where there are none."""

    maximum: float
    p99: float
    median: float
    mean: float


@dataclass(frozen=True, slots=True)
class RankAgreement:
    """What is left of the order, over all sets of items that are ranked by one label."""

    inversions: int  # of pairs whose gap is clear
    clear_pairs: int
    tau: float | None  # the smallest over the sets, Kendall's tau-b; None: no set
    top: float | None  # the smallest share of the ten best that both have; None: no set of twenty
    clear_tau: float | None  # the same over the sets that are not degenerate
    clear_top: float | None


def errors(differences: Float64Array) -> Errors:
    """Of any shape; NaN is an error of infinite size, so that no gate passes over it."""
    sizes = np.abs(differences).ravel()
    sizes = np.where(np.isnan(sizes), np.inf, sizes)
    if not sizes.size:
        return Errors(0.0, 0.0, 0.0, 0.0)
    # "higher" is a size that there is: nothing is made up between a number and infinity.
    p99, median = (float(np.percentile(sizes, q, method="higher")) for q in (99, 50))
    return Errors(float(sizes.max()), p99, median, float(sizes.mean()))


def kendall_tau_b(a: Float64Array, b: Float64Array) -> float:
    """Rank correlation of two [n] with ties (Kendall 1945), from -1 to 1; NaN if one is constant.

    (concordant - discordant) / sqrt(pairs not tied in a * pairs not tied in b), over all pairs.
    """
    of_a, of_b = _signs(a), _signs(b)
    untied = float(np.abs(of_a).sum()) * float(np.abs(of_b).sum())
    return float((of_a * of_b).sum() / np.sqrt(untied)) if untied else float("nan")


def top_overlap(want: Float64Array, got: Float64Array, top: int = TOP) -> float:
    """Share of the `top` best of `got` that are among the best of `want`; a tie is no miss."""
    top = min(top, len(want))
    last = np.sort(want)[-top]
    best = np.argsort(-got, kind="stable")[:top]
    return float((want[best] >= last).mean())


def inversions(want: Float64Array, got: Float64Array, gap: float) -> tuple[int, int]:
    """Of the pairs more than `gap` apart in `want`: how many `got` has the other way round, and
    how many there are."""
    clear = want[:, None] - want[None, :] > gap  # [n, n], each pair once
    return int((clear & (got[:, None] < got[None, :])).sum()), int(clear.sum())


def rank(
    sets: Iterable[tuple[Float64Array, Float64Array]], gap: float, noise: float, ties: float
) -> RankAgreement:
    """Put sets of (want [n], got [n]) together.

    Args:
        gap: two scores further apart than this are clear.
        noise: two scores nearer than this are as good as tied.
        ties: a set with a larger share of such pairs is degenerate: its order says nothing.
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
    """Share of all pairs that are no more than `noise` apart."""
    near = np.abs(values[:, None] - values[None, :]) <= noise
    n = len(values)
    return float((near.sum() - n) / max(1, n * (n - 1)))


def _signs(values: Float64Array) -> Float64Array:
    return np.sign(values[:, None] - values[None, :])


def _least(found: Sequence[float]) -> float | None:
    """The smallest; NaN if there is one, which is no proof and passes no gate."""
    return float(np.min(found)) if found else None
