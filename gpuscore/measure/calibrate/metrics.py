"""Measures of calibration, with bootstrap intervals over rows.

ECE is the expected calibration error of the most probable answer, in BINS bins of equal width
(Naeini et al., 2015). The Brier score is the sum of squared differences over all answers, the log
loss the negative logarithm of the right answer's probability; both are means over questions.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuscore.measure.calibrate.samples import Judged
from gpuscore.measure.reports import Interval
from gpuscore.types.arrays import Float64Array

BINS = 15
RESAMPLES, LOW, HIGH = 1000, 2.5, 97.5  # percentiles
LEAST = 1e-12  # of a probability in the log loss
NAMES = ("accuracy", "ece", "brier", "log_loss")


@dataclass(frozen=True, slots=True)
class Bin:
    """Questions whose most probable answer has a probability in one range."""

    count: int
    probability: float  # mean
    accuracy: float


def measures(judged: Judged, seed: int) -> dict[str, Interval]:
    """Return each of NAMES; resamples draw rows, because questions of one row hang together."""
    values = _per_question(judged)  # [3, Q], of which ECE needs the first two
    rng = np.random.default_rng(seed)
    rows = [np.flatnonzero(judged.rows == row) for row in np.unique(judged.rows)]
    drawn = np.empty((RESAMPLES, len(NAMES)))
    for number in range(RESAMPLES):
        chosen = np.concatenate([rows[i] for i in rng.integers(len(rows), size=len(rows))])
        drawn[number] = _means(values[:, chosen])
    low, high = np.percentile(drawn, (LOW, HIGH), axis=0)
    found = zip(_means(values).tolist(), low.tolist(), high.tolist(), strict=True)
    return {name: Interval(*ends) for name, ends in zip(NAMES, found, strict=True)}


def bins(judged: Judged) -> list[Bin]:
    """Return the bins that have a question, by probability."""
    best, is_right = _per_question(judged)[:2]
    place = _bin_of(best)
    found = []
    for number in np.unique(place):
        inside = place == number
        found.append(Bin(int(inside.sum()), float(best[inside].mean()), is_right[inside].mean()))
    return found


def _per_question(judged: Judged) -> Float64Array:
    """Return [4, Q]: probability of the best answer, whether it is right, Brier, log loss."""
    shares, questions = judged.shares, np.arange(len(judged.right))
    wanted = np.zeros_like(shares)
    wanted[questions, judged.right] = 1.0
    return np.stack(
        (
            shares.max(axis=1),
            (shares.argmax(axis=1) == judged.right).astype(np.float64),
            ((shares - wanted) ** 2).sum(axis=1),
            -np.log(np.maximum(shares[questions, judged.right], LEAST)),
        )
    )


def _means(values: Float64Array) -> Float64Array:
    best, is_right, brier, loss = values
    place = _bin_of(best)
    gap = np.bincount(place, is_right - best, minlength=BINS)
    return np.array([is_right.mean(), np.abs(gap).sum() / len(best), brier.mean(), loss.mean()])


def _bin_of(probability: Float64Array) -> NDArray[np.int64]:
    return np.minimum((probability * BINS).astype(np.int64), BINS - 1)
