"""The numbers that callers get from an engine's result: probabilities and log-probabilities of
labels, and the probability of all labels together (`label_mass`)."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gpuscore.errors import InvalidRequest
from gpuscore.types.batch import Float32Array, Float64Array, Int32Array
from gpuscore.types.item_errors import ItemError
from gpuscore.types.request import LabelTrie, ScoreRequest, ScoreResult

ItemT = TypeVar("ItemT")
ArrayT = TypeVar("ArrayT", Int32Array, Float32Array)


def spread(
    rows: Iterable[ItemT], errors: Sequence[ItemError], count: int
) -> Iterator[ItemT | None]:
    """Yield a row for each of `count` items, None for those with errors; `rows` has the others."""
    left_out = {error.index for error in errors}
    remaining = iter(rows)
    for index in range(count):
        yield None if index in left_out else next(remaining)


def scored_places(errors: Sequence[ItemError] | None, count: int | None) -> Sequence[int]:
    """Return the indices, below `count`, of the items without errors."""
    left_out = {error.index for error in errors or ()}
    places = range(count or 0)
    return [index for index in places if index not in left_out] if left_out else places


def rows_apart(
    request: ScoreRequest, result: ScoreResult
) -> tuple[tuple[Int32Array, ...], ScoreResult]:
    """Divide labels and logits of items by rows: return each row's labels, and the result with
    each row's logits. All rows of an item must have equally many labels."""
    if request.readouts is None:
        return request.label_ids, result
    places = request.readouts.places[1:]

    def apart(arrays: tuple[ArrayT, ...]) -> tuple[ArrayT, ...]:
        pairs = zip(arrays, places, strict=True)
        return tuple(row for array, rows in pairs for row in array.reshape(len(rows), -1))

    return apart(request.label_ids), replace(result, label_logits=apart(result.label_logits))


def check_temperature(temperature: float, apply_softmax: bool) -> None:
    """Refuse a temperature that is not positive and finite, or that is not 1 without softmax.

    Raises:
        InvalidRequest: the temperature is refused.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise InvalidRequest("temperature must be positive and finite", param="temperature")
    if temperature != 1.0 and not apply_softmax:
        raise InvalidRequest("temperature needs apply_softmax", param="temperature")


def label_scores(
    result: ScoreResult,
    *,
    apply_softmax: bool,
    temperature: float = 1.0,
    lengths: Int32Array | None = None,
) -> list[Float64Array]:
    """Return one row of scores per row of the result, with one column per label.

    Without softmax a score is the label's probability over the whole vocabulary, exp(logit - lse).
    With softmax it is softmax(logits / temperature) over the item's labels; a row then sums to 1.
    With `lengths`, a label's log-probability is first divided by its number of tokens.
    """
    if lengths is not None:
        assert result.lse is not None  # noqa: S101  (requests with a trie need it)
        lse = result.lse[:, None].astype(np.float64)
        means = (np.stack(result.label_logits) - lse) / lengths + lse
        result = replace(result, label_logits=tuple(means.astype(np.float32)))
    if apply_softmax:
        return _by_rows(result.label_logits, lambda rows, _: softmax(rows, temperature))
    return [np.exp(row) for row in label_logprobs(result)]


def label_logprobs(result: ScoreResult) -> list[Float64Array]:
    """Return full-vocabulary log-probabilities, natural log; the request needs `need_lse`."""
    lse = result.lse
    if lse is None:
        raise ValueError("the request did not ask for the log-sum-exp")
    # Rounding can put a logit a hair above the log-sum-exp; no probability exceeds 1.
    return _by_rows(
        result.label_logits,
        lambda rows, numbers: np.minimum(rows - lse[numbers, None], 0.0),
    )


def _by_rows(
    label_logits: tuple[Float32Array, ...], compute: Callable[[Float64Array, slice], Float64Array]
) -> list[Float64Array]:
    """Call `compute` with float64 logits [rows, labels] and the slice of rows they belong to.

    One call if all items have the same number of labels, otherwise one per item.
    """
    count = len(label_logits)
    if len({len(row) for row in label_logits}) == 1:
        together = np.concatenate(label_logits, dtype=np.float64).reshape(count, -1)
        return list(compute(together, slice(0, count)))
    return [
        compute(row[None].astype(np.float64), slice(i, i + 1))[0]
        for i, row in enumerate(label_logits)
    ]


def label_mass(
    result: ScoreResult, labels: Sequence[Int32Array], trie: LabelTrie | None = None
) -> Float64Array:
    """Return per row the probability of all its labels together, at most 1.

    Equal labels count once. A label that continues another one does not count, because the other
    one's probability contains it.

    Args:
        result: the result of some of a request's rows.
        labels: the labels of each of these rows.
        trie: the request's.
    """
    columns: list[NDArray[Any]] = [np.unique(ids, return_index=True)[1] for ids in labels]
    if trie is not None:
        columns = [trie.counted] * len(labels)
    rows = zip(label_logprobs(result), columns, strict=True)
    masses = [np.exp(row[counted]).sum() for row, counted in rows]
    return np.minimum(np.array(masses, dtype=np.float64), 1.0)


def softmax(rows: Float64Array, temperature: float = 1.0) -> Float64Array:
    """Return the softmax of rows [N, labels] along the labels."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -inf
        weights = np.exp((rows - rows.max(axis=1, keepdims=True)) / temperature)
    normed: Float64Array = weights / weights.sum(axis=1, keepdims=True)
    return normed
