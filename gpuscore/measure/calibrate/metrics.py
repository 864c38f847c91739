"""Measures of calibration, with bootstrap intervals over rows.

ECE is the expected calibration error of the most probable answer, in BINS bins of equal width
(Naeini et al., 2015). The Brier score is the sum of squared differences over all answers, the log
loss the negative logarithm of the right answer's probability; both are means over questions.
"""

import numpy as np
from numpy.typing import NDArray

from gpuscore.measure.calibrate.samples import Judged
from gpuscore.measure.intervals import Interval, Resamples
from gpuscore.measure.plots import Bin
from gpuscore.types.batch import Float64Array

BINS = 15
LEAST = 1e-12  # of a probability in the log loss


def measures(judged: Judged, seed: int) -> dict[str, Interval]:
    """Return accuracy, ECE, Brier score and log loss, each with its interval.

    Resamples draw rows, because questions of one row hang together.
    """
    best, is_right, brier, loss = _per_question(judged)
    rows, row = np.unique(judged.rows, return_inverse=True)
    resamples = Resamples.seeded(len(rows), seed)
    gaps = np.zeros((len(best), BINS))
    gaps[np.arange(len(best)), _bin_of(best)] = is_right - best
    drawn = np.abs(resamples.sums(gaps, row)).sum(axis=1) / resamples.sums(np.ones(len(row)), row)
    return {
        "accuracy": resamples.mean(is_right, row),
        "ece": Interval.of(np.abs(gaps.sum(axis=0)).sum() / len(best), drawn),
        "brier": resamples.mean(brier, row),
        "log_loss": resamples.mean(loss, row),
    }


def bins(judged: Judged) -> list[Bin]:
    """Return the bins that have a question, by probability."""
    best, is_right = _per_question(judged)[:2]
    place = _bin_of(best)
    listed = []
    for number in np.unique(place):
        inside = place == number
        listed.append(Bin(int(inside.sum()), float(best[inside].mean()), is_right[inside].mean()))
    return listed


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


def _bin_of(probability: Float64Array) -> NDArray[np.int64]:
    return np.minimum((probability * BINS).astype(np.int64), BINS - 1)
