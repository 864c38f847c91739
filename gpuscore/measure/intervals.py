"""Values with 95 % intervals, by bootstrap over groups of values with correlated errors.

Errors of one query are correlated, so queries are drawn with replacement, each with all of its
values: the bootstrap of Efron 1979 over clusters (Davison and Hinkley 1997, section 3.8). Repeats
of a measurement are groups of one. The interval is from the 2.5th to the 97.5th percentile of the
resamples. With a few groups it is too narrow; under `FEWEST` there is none.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuscore.types.batch import Float64Array

RESAMPLES = 1000
FEWEST = 5  # groups that an interval needs
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A measure and its 95 % interval; NaN without values, or with too few groups."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def __format__(self, spec: str) -> str:
        """Format the value, and the interval if there is one, as numbers of this format."""
        if math.isnan(self.value):
            return "-"
        if math.isnan(self.low):
            return f"{self.value:{spec}}"
        return f"{self.value:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def mean(groups: Sequence[Float64Array]) -> Interval:
    """Return the mean of all values; errors within a group are correlated."""
    sums = np.array([(group.sum(), group.size) for group in groups if group.size])
    return _bootstrap(lambda drawn: drawn[..., 0].sum(-1) / drawn[..., 1].sum(-1), sums)


def median(values: Float64Array) -> Interval:
    """Return the median of repeats."""
    return _bootstrap(lambda drawn: np.median(drawn, axis=-1), values)


def ratio(values: Float64Array, others: Float64Array) -> Interval:
    """Return the ratio of two medians of repeats, which were not measured in pairs."""
    return _bootstrap(lambda a, b: np.median(a, axis=-1) / np.median(b, axis=-1), values, others)


def _bootstrap(measure: Callable[..., Any], *samples: Float64Array) -> Interval:
    """Return a measure with its interval; resamples draw from the first axis of each sample.

    Args:
        measure: takes the samples, or resamples, which have one more axis in front.
        samples: groups or repeats.
    """
    fewest = min(map(len, samples))
    value = float(measure(*samples)) if fewest else math.nan
    if fewest < FEWEST or not math.isfinite(value):
        return Interval(value)
    rng = np.random.default_rng(0)  # the same draws in every run
    drawn = [sample[rng.integers(0, len(sample), (RESAMPLES, len(sample)))] for sample in samples]
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(measure(*drawn), (tail, 100 - tail))
    return Interval(value, float(low), float(high))
