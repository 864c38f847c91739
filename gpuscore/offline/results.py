"""Results of `Scorer`'s methods, as tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from gpuscore.types.batch import BoolArray, Float32Array, Float64Array
from gpuscore.types.item_errors import ItemError
from gpuscore.types.results import spread


class TokenCounts(TypedDict):
    """The numbers of tokens that every result has."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Results of `Scorer.score`, float64: rows belong to items, columns to labels.

    If items have different numbers of labels, `scores`, `logprobs` and `logits` are padded with NaN
    on the right. With `on_error="null"` the row of an item in `errors` is NaN.

    Attributes:
        scores: [N, labels], probabilities.
        logprobs: [N, labels], over the full vocabulary or all classes; None unless requested.
        label_mass: [N], the probability of all labels of an item together; None unless `logprobs`
            was requested.
        prompt_tokens: tokens of all prompts, each counted as a whole.
        cached_tokens: prompt tokens that were not computed again.
        logits: [N, labels], as the model's head gives them; None unless requested.
        labels: names of the columns: the labels' texts, or their ids; empty if items have labels of
            their own.
        errors: the items that were not scored; their tokens are not counted.
        offsets: [N + 1], with `extraction_token_id`: the rows of item i are `offsets[i]` to
            `offsets[i + 1]` - 1 of every table; else None.
    """

    scores: Float64Array  # [N, labels]
    logprobs: Float64Array | None  # [N, labels]
    label_mass: Float64Array | None  # [N]
    prompt_tokens: int
    cached_tokens: int
    logits: Float64Array | None = None  # [N, labels]
    labels: tuple[str, ...] = ()
    errors: tuple[ItemError, ...] = ()
    offsets: NDArray[np.int64] | None = None  # [N + 1]


@dataclass(frozen=True, slots=True)
class Ranking:
    """A ranking of documents, best first; documents with equal scores keep the given order.

    With `on_error="null"` it leaves out the documents in `errors`, which have no rank.

    Attributes:
        indices: [n], each document's place in the given list.
        scores: [n], float64: relevance from 0 to 1, or raw scores if requested.
        truncated: [n], True if the document was truncated, as the call allowed.
        documents: [n], the given documents.
        prompt_tokens: tokens of all prompts, each counted as a whole.
        cached_tokens: prompt tokens that were not computed again.
        errors: the documents that were not scored.
    """

    indices: NDArray[np.int64]  # [n]
    scores: Float64Array  # [n]
    truncated: BoolArray  # [n]
    documents: tuple[str, ...]  # [n]
    prompt_tokens: int
    cached_tokens: int
    errors: tuple[ItemError, ...] = ()


@dataclass(frozen=True, slots=True)
class PairScores:
    """Scores of pairs, in the given order.

    Attributes:
        scores: [N], float64: relevance from 0 to 1, or raw scores if requested; NaN for a
            pair in `errors`.
        truncated: [N], True if the document was truncated, as the call allowed.
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens that were not computed again.
        errors: with `on_error="null"`: the pairs that were not scored.
    """

    scores: Float64Array  # [N]
    truncated: BoolArray  # [N]
    prompt_tokens: int
    cached_tokens: int
    errors: tuple[ItemError, ...] = ()


@dataclass(frozen=True, slots=True)
class Classification:
    """Classes of texts, in the given order.

    Attributes:
        classes: names of the columns.
        probabilities: [N, classes], float64.
        best: [N], the most probable class of each text.
        truncated: [N], True if the text was truncated, as the call allowed.
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens that were not computed again.
    """

    classes: tuple[str, ...]
    probabilities: Float64Array  # [N, classes]
    best: tuple[str, ...]  # [N]
    truncated: BoolArray  # [N]
    prompt_tokens: int
    cached_tokens: int


def rectangle(
    rows: Sequence[Sequence[float] | Float64Array | Float32Array | None], width: int
) -> Float64Array:
    """Return rows as float64 [N, most]; NaN fills the ends of shorter rows, and empty rows.

    Args:
        rows: rows of any lengths.
        width: number of columns if there is no row with numbers.
    """
    most = max((len(row) for row in rows if row is not None), default=width if rows else 0)
    table = np.full((len(rows), most), np.nan)
    for target, row in zip(table, rows, strict=True):
        if row is not None:
            target[: len(row)] = row
    return table


def column(values: Float64Array | None, errors: Sequence[ItemError], count: int) -> Float64Array:
    """Return float64 [count]: the values in their order, and NaN in the places of errors."""
    spread_out = spread([] if values is None else values.tolist(), errors, count)
    return np.array([np.nan if value is None else value for value in spread_out], dtype=np.float64)
