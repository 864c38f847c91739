"""Values with 95 % intervals, by bootstrap over groups of values that err together.

Scores of one query err together. So groups are drawn with replacement,
each with all of its values: the bootstrap of Efron 1979 over clusters (Davison and Hinkley 1997,
section 3.8). The interval is from the 2.5th to the 97.5th percentile of the resamples. With a few
groups it is too narrow; under `FEWEST` there is none.
"""

import math
from dataclasses import dataclass

import numpy as np

from gpuscore.types.batch import Float64Array, Int64Array

RESAMPLES, FEWEST, LEVEL = 1000, 5, 0.95
_AT_ONCE = 2**22  # elements of an array


@dataclass(frozen=True, slots=True)
class Interval:
    """A measure and its 95 % interval; NaN without values, or with too few groups."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def of(cls, value: float, resampled: Float64Array) -> "Interval":
        """Return a value with the percentiles of its resamples; resamples that are NaN are left
        out."""
        tail = 100 * (1 - LEVEL) / 2
        low, high = np.nanpercentile(resampled, (tail, 100 - tail))
        return cls(float(value), float(low), float(high))

    def __format__(self, spec: str) -> str:
        """Return the value, and the interval if there is one, with a format of numbers."""
        if math.isnan(self.value):
            return "-"
        if math.isnan(self.low):
            return f"{self.value:{spec}}"
        return f"{self.value:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


class Resamples:
    """Draws of groups with replacement, the same for all measures and in every run.

    Args:
        groups: their number; each value has the number of its group, from 0.
    """

    def __init__(self, groups: int) -> None:
        self._groups = groups
        rng = np.random.RandomState(0)
        self._weights = rng.multinomial(groups, [1 / groups] * groups, RESAMPLES)

    def sums(self, values: Float64Array, groups: Int64Array) -> Float64Array:
        """Return the sums [RESAMPLES, ...] of each resample's values [n, ...]."""
        of_groups = np.zeros((self._groups, *values.shape[1:]))
        np.add.at(of_groups, groups, values)
        sums_of_draws: Float64Array = self._weights.astype(np.float64) @ of_groups
        return sums_of_draws

    def mean(self, values: Float64Array, groups: Int64Array) -> Interval:
        """Return the mean of `values` [n]; `groups` [n] has the number of each value's group."""
        if not values.size:
            return Interval(math.nan)
        value = float(values.mean())
        if not self._enough(values, groups):
            return Interval(value)
        drawn = self.sums(np.ones(len(values)), groups)
        return Interval.of(value, self.sums(values, groups)[drawn > 0] / drawn[drawn > 0])

    def quantile(self, values: Float64Array, groups: Int64Array, q: float) -> Interval:
        """Return a quantile of `values`: of its two neighbours among them, the higher."""
        if not values.size:
            return Interval(math.nan)
        order = np.argsort(values)
        ordered = values[order]
        value = float(ordered[math.ceil(q * (len(ordered) - 1))])
        if not self._enough(values, groups):
            return Interval(value)
        quantiles = []
        step = max(1, _AT_ONCE // len(ordered))
        for start in range(0, RESAMPLES, step):
            sums = self._weights[start : start + step, groups[order]].cumsum(axis=1)
            place = np.ceil(q * (sums[:, -1] - 1))
            drawn = sums[:, -1] > 0
            index = (sums > place[:, None]).argmax(axis=1)
            quantiles.append(ordered[index[drawn]])
        return Interval.of(value, np.concatenate(quantiles))

    def _enough(self, values: Float64Array, groups: Int64Array) -> bool:
        return len(np.unique(groups)) >= FEWEST and bool(np.isfinite(values).all())
