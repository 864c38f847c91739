"""Permitted noise, and the least tau-b of a ranking that it implies (NumPy only).

A gate permits errors in log p of certain sizes. Errors of these sizes, drawn at random, swap items
that are close to each other: a pair `d` apart with the probability that two errors differ by more
than `d` (Thurstone's law of comparative judgment, 1927). So how well a ranking can agree depends on
its gaps, and no fixed tau-b suits all rankings. The limit comes from a simulation: DRAWS times, the
ranking gets independent errors. It may be `DEVIATIONS` standard deviations of the draws below their
mean, or as many single swaps. So errors as large as permitted fail the gate in fewer than one of
a hundred workloads.
"""

import math

import numpy as np

from gpuscore.measure.agreement import kendall_tau_b
from gpuscore.types.batch import Float64Array

DRAWS, DEVIATIONS = 100, 4.0
UNLIKELY = 2.33  # standard deviations that one of a hundred exceeds
_SIZES = 1000  # of the distributions that are not measured


def up_to(maximum: float) -> Float64Array:
    """Return the sizes of errors that are equally likely up to a maximum."""
    return np.linspace(0.0, maximum, _SIZES)


def normal(p99: float, maximum: float = math.inf) -> Float64Array:
    """Return the sizes of normally distributed errors with this p99, cut at the maximum."""
    drawn = np.abs(np.random.RandomState(0).normal(size=_SIZES))
    sizes: Float64Array = np.minimum(drawn * p99 / np.percentile(drawn, 99), maximum)
    return sizes


def least_tau(reference: Float64Array, sizes: Float64Array) -> float | None:
    """Return the least tau-b of a ranking [n] whose scores have errors of these sizes.

    None: the errors hide the order, because a random order may have this tau-b, too. That follows
    from the variance of tau among random orders (Kendall 1938).
    """
    n, rng = len(reference), np.random.RandomState(0)  # the same limits in every run
    noise = rng.choice(sizes, (DRAWS, n)) * rng.choice((-1.0, 1.0), (DRAWS, n))
    taus = [kendall_tau_b(reference, reference + errors) for errors in noise]
    deviation = max(float(np.std(taus)), 4 / (n * (n - 1)))
    least = float(np.mean(taus)) - DEVIATIONS * deviation
    by_chance = UNLIKELY * math.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1)))
    return least if least > by_chance else None
