"""From what the model says at the last token to what a caller asked for."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gpuscore.arrays import Float32Array, Float64Array, Int32Array
from gpuscore.errors import InvalidRequest
from gpuscore.request import ScoreResult


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
        return _by_rows(result.label_logits, lambda rows, _: softmax(rows, temperature))
    return [np.exp(row) for row in label_logprobs(result)]


def label_logprobs(result: ScoreResult) -> list[Float64Array]:
    """Full-vocabulary log-probabilities, natural log; needs the request's `need_lse`."""
    lse = result.lse
    if lse is None:
        raise ValueError("the request did not ask for the log-sum-exp")
    # Rounding can put a logit a hair above the log-sum-exp; no probability exceeds 1.
    return _by_rows(
        result.label_logits,
        lambda rows, which: np.minimum(rows - lse[which, None].astype(np.float64), 0.0),
    )


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Full-vocabulary log-probabilities at every position of a request's items, float64 [rows].

    A token has exactly the float of the best one where it is the best one, and a smaller one
    elsewhere: the two are sums in another order, so a token that is nearly as probable could end up
    above it. `label == best` therefore says whether greedy decoding would have chosen it (the
    lowest id, where logits are equal).
    """

    label: Float64Array
    best: Float64Array
    best_ids: Int32Array


def position_logprobs(result: ScoreResult, label_ids: Sequence[Int32Array]) -> PositionLogprobs:
    """Of a request with one label per row, `need_lse` and `need_top`."""
    best, best_ids, lse = _best(result)
    logits = np.concatenate(result.label_logits).astype(np.float64)
    label = np.minimum(logits - lse, np.nextafter(best, -np.inf))
    is_best = np.concatenate(label_ids) == best_ids
    return PositionLogprobs(np.where(is_best, best, label), best, best_ids)


def best_logprobs(result: ScoreResult) -> tuple[Float64Array, Int32Array]:
    """Log-probability and id of each row's most probable token."""
    return _best(result)[:2]


def _best(result: ScoreResult) -> tuple[Float64Array, Int32Array, Float64Array]:
    """The same, and the rows' log-sum-exp, float64."""
    lse, ids, logits = result.lse, result.top_ids, result.top_logits
    if lse is None or ids is None or logits is None:
        raise ValueError("the request did not ask for the log-sum-exp and the best tokens")
    wide = lse.astype(np.float64)
    return np.minimum(logits - wide, 0.0), ids, wide


def _by_rows(
    label_logits: tuple[Float32Array, ...], compute: Callable[[Float64Array, slice], Float64Array]
) -> list[Float64Array]:
    """`compute` on float64 [rows, labels] and which rows these are: all at once if it can be."""
    count = len(label_logits)
    if len({len(row) for row in label_logits}) == 1:
        together = np.concatenate(label_logits).astype(np.float64).reshape(count, -1)
        return list(compute(together, slice(0, count)))
    return [
        compute(row[None].astype(np.float64), slice(i, i + 1))[0]
        for i, row in enumerate(label_logits)
    ]


def label_mass(result: ScoreResult, label_ids: tuple[Int32Array, ...]) -> Float64Array:
    """Per item the probability of all its distinct labels together."""
    masses = [
        np.exp(row[np.unique(ids, return_index=True)[1]]).sum()
        for row, ids in zip(label_logprobs(result), label_ids, strict=True)
    ]
    return np.minimum(np.array(masses, dtype=np.float64), 1.0)


def softmax(rows: Float64Array, temperature: float = 1.0) -> Float64Array:
    """[N, labels], along the labels."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -inf
        weights = np.exp((rows - rows.max(axis=1, keepdims=True)) / temperature)
    normed: Float64Array = weights / weights.sum(axis=1, keepdims=True)
    return normed
