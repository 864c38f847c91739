"""From what the model says at the last token to what a caller asked for."""

import math

import numpy as np

from gpuscore.errors import InvalidRequest
from gpuscore.types import Float64Array, Int32Array, ScoreResult


def check_temperature(temperature: float, apply_softmax: bool) -> None:
    """Raises InvalidRequest unless temperature is finite, positive, and 1 without softmax."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise InvalidRequest("temperature must be positive and finite", param="temperature")
    if temperature != 1.0 and not apply_softmax:
        raise InvalidRequest("temperature needs apply_softmax", param="temperature")


def label_scores(
    result: ScoreResult, *, apply_softmax: bool, temperature: float = 1.0
) -> list[Float64Array]:
    """One row per item, one column per label.

    Without softmax: the label's probability over the whole vocabulary, exp(logit - lse). With it:
    softmax(logits / temperature) over the item's own labels, which sums to 1.
    """
    if apply_softmax:
        return [_softmax(row.astype(np.float64), temperature) for row in result.label_logits]
    return [np.exp(row) for row in label_logprobs(result)]


def label_logprobs(result: ScoreResult) -> list[Float64Array]:
    """Full-vocabulary log-probabilities, natural log; needs the request's `need_lse`."""
    if result.lse is None:
        raise ValueError("the request did not ask for the log-sum-exp")
    # Rounding can put a logit a hair above the log-sum-exp; no probability exceeds 1.
    return [
        np.minimum(row.astype(np.float64) - float(lse), 0.0)
        for row, lse in zip(result.label_logits, result.lse, strict=True)
    ]


def label_mass(result: ScoreResult, label_ids: tuple[Int32Array, ...]) -> Float64Array:
    """Per item the probability of all its distinct labels together."""
    masses = [
        np.exp(row[np.unique(ids, return_index=True)[1]]).sum()
        for row, ids in zip(label_logprobs(result), label_ids, strict=True)
    ]
    return np.minimum(np.array(masses, dtype=np.float64), 1.0)


def _softmax(values: Float64Array, temperature: float) -> Float64Array:
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -inf
        weights: Float64Array = np.exp((values - values.max()) / temperature)
    return weights / float(weights.sum())
