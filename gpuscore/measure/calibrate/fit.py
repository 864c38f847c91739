"""Fitting a temperature, and a bias per option, by the negative log-likelihood of right answers.

With b = 1 / temperature the loss is convex in b and in the biases together, so Newton's method
finds its one minimum. A weak prior keeps the bias of options that are rarely seen near 0.
"""

import numpy as np

from gpuscore.measure.calibrate.samples import Judged, Places, Samples
from gpuscore.prompts.calibration import MAX_BIAS, Scaling
from gpuscore.types.batch import Float64Array
from gpuscore.types.labels import softmax

COLDEST, HOTTEST = 0.05, 20.0  # temperatures; where all is right, the best one would be 0
STEPS = 100
PRIOR = 1.0  # nats per squared nat of bias, against the sum over all samples
SMALL = 1e-9  # of a step that is worth another


def fit(samples: Samples, with_bias: bool) -> Scaling:
    """Return the scaling with the least negative log-likelihood."""
    inverse, bias = 1.0, np.zeros(samples.logprobs.shape[1] if with_bias else 0)
    for _ in range(STEPS):
        gradient, hessian = _slopes(samples, inverse, bias)
        step = np.linalg.solve(hessian, gradient)
        before = _loss(samples, inverse, bias)
        for halving in 0.5 ** np.arange(30):  # a full step may go too far
            b = float(np.clip(inverse - halving * step[0], 1 / HOTTEST, 1 / COLDEST))
            moved = np.clip(bias - halving * step[1:], -MAX_BIAS, MAX_BIAS)
            if _loss(samples, b, moved) <= before:
                break
        change = max(abs(b - inverse), *np.abs(moved - bias), 0.0)
        inverse, bias = b, moved
        if change < SMALL:
            break
    return Scaling(1 / inverse, tuple(bias.tolist()))


def out_of_fold(samples: Samples, with_bias: bool, folds: int, seed: int) -> Judged:
    """Return every question's answer by a scaling that was fitted without its row."""
    fold = fold_of(samples.rows, folds, seed)
    shares = np.zeros_like(samples.logprobs)
    for number in range(folds):
        held = fold == number
        if held.any():
            scaling = fit(samples.part(~held), with_bias)
            shares[held] = samples.part(held).shares(scaling)
    return Judged.of(samples, shares)


def fold_of(rows: Places, folds: int, seed: int) -> Places:
    """Return the fold of each sample: one for a row, and equally many rows in each."""
    different, place = np.unique(rows, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(different))
    numbers: Places = (order % folds)[place]
    return numbers


def _loss(samples: Samples, inverse: float, bias: Float64Array) -> float:
    shares = _shares(samples, inverse, bias)
    right = shares[np.arange(len(samples)), samples.right]
    return float(-np.log(np.maximum(right, 1e-300)).sum() + PRIOR / 2 * (bias**2).sum())


def _shares(samples: Samples, inverse: float, bias: Float64Array) -> Float64Array:
    scores = samples.logprobs * inverse
    return softmax(scores + bias if len(bias) else scores)


def _slopes(
    samples: Samples, inverse: float, bias: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Return the gradient [1 + biases] and the Hessian of the loss, in (inverse, biases)."""
    shares = _shares(samples, inverse, bias)
    known = np.isfinite(samples.logprobs)
    logs = np.where(known, samples.logprobs, 0.0)
    mean = (shares * logs).sum(axis=1)
    right = np.arange(len(samples)), samples.right
    gradient = np.zeros(1 + len(bias))
    gradient[0] = (mean - logs[right]).sum()
    hessian = np.zeros((1 + len(bias),) * 2)
    hessian[0, 0] = ((shares * logs**2).sum(axis=1) - mean**2).sum() + SMALL
    if len(bias):
        wanted = np.zeros_like(shares)
        wanted[right] = 1.0
        gradient[1:] = (shares - wanted).sum(axis=0) + PRIOR * bias
        hessian[1:, 1:] = np.diag(shares.sum(axis=0) + PRIOR) - shares.T @ shares
        hessian[0, 1:] = hessian[1:, 0] = (shares * (logs - mean[:, None])).sum(axis=0)
    return gradient, hessian
