"""Intervals by bootstrap over queries (NumPy only).

Scores of one query err together, so queries are drawn with replacement, each with all of its
scores: the bootstrap of Efron 1979 over clusters (Davison and Hinkley 1997, section 3.8). The
interval is from the 2.5th to the 97.5th percentile of the resamples. With a few queries it is too
narrow; under `FEWEST` there is none.
"""

import math

import numpy as np

from gpuscore.measure.reports import Interval
from gpuscore.types.arrays import Float64Array, Int64Array

RESAMPLES, FEWEST, LEVEL = 1000, 5, 0.95
_AT_ONCE = 2**22  # elements of an array


class Resamples:
    """Draws of queries with replacement, the same for all measures of a workload."""

    def __init__(self, queries: int, seed: int = 0) -> None:
        """Draw as many queries as there are, `RESAMPLES` times."""
        rng = np.random.RandomState(seed)  # the same intervals in every run
        self._queries = queries
        self._weights = rng.multinomial(queries, [1 / queries] * queries, RESAMPLES)

    def mean(self, values: Float64Array, queries: Int64Array) -> Interval:
        """Return the mean of `values` [n], of which `queries` [n] are the numbers."""
        if not values.size:
            return Interval(math.nan)
        value = float(values.mean())
        if not self._enough(values, queries):
            return Interval(value)
        sums = np.bincount(queries, values, self._queries)
        counts = np.bincount(queries, minlength=self._queries)
        drawn = self._weights @ counts
        means = (self._weights @ sums)[drawn > 0] / drawn[drawn > 0]
        return _interval(value, means)

    def quantile(self, values: Float64Array, queries: Int64Array, q: float) -> Interval:
        """Return a quantile of `values`, the higher of the two next to it."""
        if not values.size:
            return Interval(math.nan)
        order = np.argsort(values)
        ordered = values[order]
        value = float(ordered[math.ceil(q * (len(ordered) - 1))])
        if not self._enough(values, queries):
            return Interval(value)
        found = []
        step = max(1, _AT_ONCE // len(ordered))
        for start in range(0, RESAMPLES, step):
            sums = self._weights[start : start + step, queries[order]].cumsum(axis=1)
            place = np.ceil(q * (sums[:, -1] - 1))
            drawn = sums[:, -1] > 0
            index = (sums > place[:, None]).argmax(axis=1)
            found.append(ordered[index[drawn]])
        return _interval(value, np.concatenate(found))

    def _enough(self, values: Float64Array, queries: Int64Array) -> bool:
        return len(np.unique(queries)) >= FEWEST and bool(np.isfinite(values).all())


def _interval(value: float, resampled: Float64Array) -> Interval:
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(resampled, (tail, 100 - tail))
    return Interval(value, float(low), float(high))
