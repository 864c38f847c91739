"""Permitted noise, and the least agreement of rankings that it implies (NumPy only).

A gate permits errors in log p of certain sizes. Errors of these sizes, drawn at random, swap items
that are close to each other: a pair `d` apart with the probability that two errors differ by more
than `d` (Thurstone's law of comparative judgment, 1927). So how well a ranking can agree depends on
its gaps, and no fixed tau-b suits all rankings.

The limits come from a simulation, which is a Monte Carlo test (Barnard 1963): DRAWS times, every
ranking gets independent errors. An agreement is measured by its distance below the ranking's mean
of all draws, in standard deviations of the draws or in single swaps, whichever is larger. The limit
is the distance that the worst ranking of a draw exceeds in `RATE` of all draws (the largest
statistic of several, as Westfall and Young 1993 correct for many tests). So errors as large as
permitted fail a gate with the probability RATE, however many rankings there are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

import numpy as np

from gpuscore.measure.parity.metrics import TOP, RankedScores, kendall_tau_b, top_overlap
from gpuscore.types.batch import Float64Array

DRAWS, RATE = 999, 0.01
# The distance at this place of the sorted draws is exceeded with the probability RATE.
_PLACE = math.ceil((1 - RATE) * (DRAWS + 1)) - 1
_ROUNDING = 1e-9  # of agreements; one swap among 10,000 items is more
_STEPS = 1000  # of the distributions that are not measured


@dataclass(frozen=True, slots=True)
class PermittedNoise:
    """Errors in log p that a gate permits: sizes that are equally likely, of either sign."""

    sizes: Float64Array
    clear: float  # the order of two scores more than twice this apart is clear

    @classmethod
    def up_to(cls, maximum: float) -> "PermittedNoise":
        """Make errors of every size up to a maximum."""
        return cls(np.linspace(0.0, maximum, _STEPS), maximum)

    @classmethod
    def normal(cls, p99: float, maximum: float = math.inf) -> "PermittedNoise":
        """Make normally distributed errors with this p99 of their sizes, cut at the maximum."""
        inverse = NormalDist(sigma=p99 / NormalDist().inv_cdf(0.995)).inv_cdf
        sizes = [inverse(0.5 + (step + 0.5) / (2 * _STEPS)) for step in range(_STEPS)]
        return cls(np.minimum(sizes, maximum), p99)

    @classmethod
    def multiple(cls, factor: float, errors: Float64Array, p99: float) -> "PermittedNoise":
        """Make `factor` times these measured errors, whose sizes have this p99."""
        sizes = np.abs(errors[np.isfinite(errors)])
        return cls(factor * sizes if sizes.size else np.zeros(1), factor * p99)

    def draw(self, rng: np.random.RandomState, count: int) -> Float64Array:
        """Draw errors [count, DRAWS]."""
        chosen = self.sizes[rng.randint(0, len(self.sizes), (count, DRAWS))]
        signs = 2.0 * rng.randint(0, 2, (count, DRAWS)) - 1.0
        drawn: Float64Array = chosen * signs
        return drawn


class TauB:
    """Kendall's tau-b of all items."""

    fewest = 2  # items of a ranking that it is about

    def of(self, reference: Float64Array, got: Float64Array) -> float:
        """Measure the agreement of `got` [n] with `reference` [n]; 1 for the same order."""
        return kendall_tau_b(reference, got)

    def drawn(self, reference: Float64Array, noise: Float64Array) -> Float64Array:
        """Measure for each draw how `reference` [n] plus noise [n, DRAWS] agrees with itself."""
        order = np.argsort(reference)
        reference, noise = reference[order], noise[order]
        most = 2 * float(np.abs(noise).max())
        swaps, tied = np.zeros(noise.shape[1]), 0
        for apart in range(1, len(reference)):
            gaps = reference[apart:] - reference[:-apart]
            if gaps.min() > most:
                break
            overtaken = noise[:-apart] - noise[apart:] > gaps[:, None]
            swaps += overtaken[gaps > 0].sum(axis=0)
            tied += int((gaps == 0).sum())
        pairs = len(reference) * (len(reference) - 1) / 2
        taus: Float64Array = (pairs - tied - 2 * swaps) / math.sqrt(max(1, pairs - tied) * pairs)
        return taus

    def step(self, n: int) -> float:
        """Return the difference that the smallest swap makes among n items."""
        return 4 / (n * (n - 1))

    def by_chance(self, n: int) -> float:
        """Return about the value that one in a hundred random orders of n items exceeds.

        It follows from the variance of tau among random orders (Kendall 1938).
        """
        return _UNLIKELY * math.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1)))


class TopOverlap:
    """The share of the ten best that stay among the ten best; `TauB` explains the methods."""

    fewest = 2 * TOP

    def of(self, reference: Float64Array, got: Float64Array) -> float:
        return top_overlap(reference, got) if np.isfinite(got).all() else math.nan

    def drawn(self, reference: Float64Array, noise: Float64Array) -> Float64Array:
        last = np.sort(reference)[-TOP]
        best = np.argpartition(-(reference[:, None] + noise), TOP - 1, axis=0)[:TOP]
        overlaps: Float64Array = (reference[best] >= last).mean(axis=0)
        return overlaps

    def step(self, n: int) -> float:
        return 1 / TOP

    def by_chance(self, n: int) -> float:
        """Use the moments of the hypergeometric distribution: TOP draws from n, with TOP hits."""
        share = TOP / n
        variance = share * (1 - share) * (n - TOP) / (n - 1) / TOP
        return share + _UNLIKELY * math.sqrt(variance)


Agreement: TypeAlias = TauB | TopOverlap  # measures of how well two orders agree
_UNLIKELY = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True, slots=True)
class WorstRanking:
    """The ranking that is furthest below what the permitted noise implies."""

    name: str
    measured: float
    least: float  # the limit
    expected: float  # the mean of the draws
    rankings: int
    telling: int  # rankings in which a random order would be below the limit

    @property
    def within(self) -> bool:
        return self.measured >= self.least - _ROUNDING  # not so for NaN


def worst_ranking(
    rankings: Sequence[RankedScores], noise: PermittedNoise, agreement: Agreement
) -> WorstRanking | None:
    """Compare rankings with what the noise implies; None if none is long enough.

    Rankings whose scores are all equal have no order and do not count.
    """
    rng = np.random.RandomState(0)  # the same limits in every run
    counted = [
        ranking
        for ranking in rankings
        if len(ranking.reference) >= agreement.fewest and np.ptp(ranking.reference) != 0
    ]
    if not counted:
        return None
    means, units, distances = [], [], []
    for ranking in counted:
        drawn = agreement.drawn(ranking.reference, noise.draw(rng, len(ranking.reference)))
        means.append(drawn.mean())
        units.append(max(float(drawn.std()), agreement.step(len(ranking.reference))))
        distances.append((means[-1] - drawn) / units[-1])
    limit = np.sort(np.max(distances, axis=0))[_PLACE]
    least = np.array(means) - limit * np.array(units)
    agreements = np.array([agreement.of(ranking.reference, ranking.got) for ranking in counted])
    # NaN is the worst: a ranking of equal or missing scores agrees with none.
    below = np.where(np.isnan(agreements), np.inf, (np.array(means) - agreements) / units)
    worst = int(np.argmax(below))
    telling = sum(
        bool(line > agreement.by_chance(len(ranking.reference)))
        for line, ranking in zip(least, counted, strict=True)
    )
    return WorstRanking(
        counted[worst].name,
        float(agreements[worst]),
        float(least[worst]),
        float(means[worst]),
        len(counted),
        telling,
    )
