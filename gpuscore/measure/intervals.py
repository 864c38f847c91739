"""Values with 95 % intervals, by bootstrap over groups of values that err together.

Scores of one query err together, so queries are drawn with replacement, each with all of its
values: the bootstrap of Efron 1979 over clusters (Davison and Hinkley 1997, section 3.8). Repeats
of a measurement are groups of one. The interval is from the 2.5th to the 97.5th percentile of the
resamples. With a few groups it is too narrow; under `FEWEST` there is none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpuscore.types.batch import Float64Array

RESAMPLES, FEWEST, LEVEL = 1000, 5, 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A measure and its 95 % interval; NaN without values, or with too few groups."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def of(cls, value: float, resampled: Float64Array) -> "Interval":
        """Return a value with the percentiles of its resamples."""
        tail = 100 * (1 - LEVEL) / 2
        low, high = np.percentile(resampled, (tail, 100 - tail))
        return cls(float(value), float(low), float(high))

    def __format__(self, spec: str) -> str:
        """Return the value, and the interval if there is one, with a format of numbers."""
        if math.isnan(self.value):
            return "-"
        if math.isnan(self.low):
            return f"{self.value:{spec}}"
        return f"{self.value:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def mean(groups: Sequence[Float64Array]) -> Interval:
    """Return the mean of all values; values of a group err together."""
    sums = np.array([group.sum() for group in groups])
    counts = np.array([group.size for group in groups])
    if not counts.sum():
        return Interval(math.nan)
    value = float(sums.sum() / counts.sum())
    if np.count_nonzero(counts) < FEWEST or not np.isfinite(sums).all():
        return Interval(value)
    # The same draws for all measures and in every run.
    weights = np.random.RandomState(0).multinomial(
        len(groups), [1 / len(groups)] * len(groups), RESAMPLES
    )
    drawn = weights @ counts
    return Interval.of(value, (weights @ sums)[drawn > 0] / drawn[drawn > 0])


def median(values: Float64Array) -> Interval:
    """Return the median of repeats."""
    if not len(values):
        return Interval(math.nan)
    value = float(np.median(values))
    if len(values) < FEWEST:
        return Interval(value)
    return Interval.of(value, _medians(values, np.random.default_rng(0)))


def ratio(values: Float64Array, others: Float64Array) -> Interval:
    """Return the ratio of two medians of repeats, which were not measured in pairs."""
    value = float(np.median(values) / np.median(others))
    if min(len(values), len(others)) < FEWEST:
        return Interval(value)
    rng = np.random.default_rng(0)
    return Interval.of(value, _medians(values, rng) / _medians(others, rng))


def _medians(values: Float64Array, rng: np.random.Generator) -> Float64Array:
    drawn: Float64Array = np.median(rng.choice(values, (RESAMPLES, len(values))), axis=1)
    return drawn
