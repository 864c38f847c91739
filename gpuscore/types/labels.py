"""Tokens that labels of several tokens need, and probabilities of labels."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gpuscore.errors import InvalidRequest
from gpuscore.types.batch import BackendLimits, Float32Array, Float64Array, Int32Array
from gpuscore.types.request import LabelTrie, ScoreRequest, ScoreResult


def most_tokens(request: ScoreRequest, limits: BackendLimits) -> int:
    """Return the tokens to compute if nothing is cached, whole prompts of nodes included."""
    trie = request.trie
    if trie is None:
        return request.num_tokens
    _, items = cut_for_labels(request, limits)
    whole = [item for item in items if not fits_batch(item, trie, limits)]
    again = sum(map(len, whole)) * trie.num_nodes
    if whole:
        again += len(whole) * sum(len(path) - 1 for path in trie.paths())
    return request.num_tokens + again


def per_token(result: ScoreResult, trie: LabelTrie | None) -> ScoreResult:
    """Return the result with each label's sum divided by the label's number of tokens."""
    if trie is None:
        return result
    assert result.lse is not None  # noqa: S101  (requests with a trie need it)
    lse = result.lse[:, None].astype(np.float64)
    means = (np.stack(result.label_logits) - lse) / trie.lengths + lse
    return replace(result, label_logits=tuple(means.astype(np.float32)))


def fits_batch(item: Int32Array, trie: LabelTrie, limits: BackendLimits) -> bool:
    """Return True if an item and its nodes may be computed in one batch.

    With --deterministic bits depend on the division into segments, so nodes continue nothing.
    """
    return not limits.deterministic_chunk and len(item) + trie.num_nodes <= limits.max_tokens


def cut_for_labels(
    request: ScoreRequest, limits: BackendLimits
) -> tuple[Int32Array, tuple[Int32Array, ...]]:
    """Return query and items; an only item keeps its last token if it would not fit a batch.

    What all prompts share may be anything, and a query runs in chunks of any size. This needs
    pages. With --deterministic the cut depends on the query alone.
    """
    query, items, trie = request.query_ids, request.item_ids, request.trie
    alone = trie is not None and len(items) == 1 and not limits.deterministic_chunk
    if not alone or trie is None or fits_batch(items[0], trie, limits):
        return query, items
    longer = np.concatenate((query, items[0][:-1]))
    if len(longer) > limits.num_pages * limits.page_size:
        return query, items
    return longer, (items[0][-1:],)


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
    result: ScoreResult, *, apply_softmax: bool, temperature: float = 1.0
) -> list[Float64Array]:
    """Return one row of scores per item, with one column per label.

    Without softmax a score is the label's probability over the whole vocabulary, exp(logit - lse).
    With softmax it is softmax(logits / temperature) over the item's labels; a row then sums to 1.
    """
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


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Full-vocabulary log-probabilities at every position of a request's items, float64 [rows].

    `label` equals a number of `top` exactly where the label is that token, and is smaller than all
    of them elsewhere. This is enforced, because the two logits are summed in different orders, and
    a token that is nearly as probable could come out above. So `label == best` tells whether greedy
    decoding would have chosen the label (the lowest id, if logits are equal).
    """

    label: Float64Array
    top: Float64Array  # [rows, num_top], the most probable tokens, the first ones first
    top_ids: Int32Array  # [rows, num_top]

    def part(self, *slices: slice) -> "PositionLogprobs":
        """Return these slices of the rows, one after the other."""
        parts = (
            np.concatenate([values[rows] for rows in slices])
            for values in (self.label, self.top, self.top_ids)
        )
        return PositionLogprobs(*parts)

    @property
    def best(self) -> Float64Array:
        return self.top[:, 0]

    @property
    def best_ids(self) -> Int32Array:
        return self.top_ids[:, 0]


def position_logprobs(result: ScoreResult, label_ids: Sequence[Int32Array]) -> PositionLogprobs:
    """Return log-probabilities per row; the request has one label per row, lse and top tokens."""
    top, top_ids = top_logprobs(result)
    assert result.lse is not None  # noqa: S101  (there are top tokens)
    logits = np.concatenate(result.label_logits).astype(np.float64)
    label = np.minimum(logits - result.lse.astype(np.float64), np.nextafter(top[:, -1], -np.inf))
    is_top = np.concatenate(label_ids)[:, None] == top_ids  # [rows, num_top]
    label = np.where(is_top.any(axis=1), np.where(is_top, top, -np.inf).max(axis=1), label)
    return PositionLogprobs(label, top, top_ids)


def top_logprobs(result: ScoreResult) -> tuple[Float64Array, Int32Array]:
    """Return log-probabilities and ids of each row's most probable tokens, [rows, num_top]."""
    lse, ids, logits = result.lse, result.top_ids, result.top_logits
    if lse is None or ids is None or logits is None:
        raise ValueError("the request did not ask for the log-sum-exp and the best tokens")
    return np.minimum(logits - lse.astype(np.float64)[:, None], 0.0), ids


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
    result: ScoreResult, request: ScoreRequest, items: slice = slice(None)
) -> Float64Array:
    """Return per item the probability of all its labels together, at most 1.

    Equal labels count once. A label that continues another one does not count, because the other
    one's probability contains it.

    Args:
        result: the result of these items of the request alone.
    """
    columns: list[NDArray[Any]] = []
    if request.trie is None:
        columns = [np.unique(ids, return_index=True)[1] for ids in request.label_ids[items]]
    else:
        columns = [request.trie.counted] * len(result.label_logits)
    rows = zip(label_logprobs(result), columns, strict=True)
    masses = [np.exp(row[counted]).sum() for row, counted in rows]
    return np.minimum(np.array(masses, dtype=np.float64), 1.0)


def softmax(rows: Float64Array, temperature: float = 1.0) -> Float64Array:
    """Return the softmax of rows [N, labels] along the labels."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -inf
        weights = np.exp((rows - rows.max(axis=1, keepdims=True)) / temperature)
    normed: Float64Array = weights / weights.sum(axis=1, keepdims=True)
    return normed
