"""The results of `Scorer`'s methods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuscore.arrays import BoolArray, Float64Array
from gpuscore.offline.tables import Table


@dataclass(frozen=True, slots=True)
class Scores(Table):
    """Results of `Scorer.score`, float64: rows belong to items, columns to labels.

    If items have different numbers of labels, `scores`, `logprobs` and `logits` are padded with NaN
    on the right.

    Attributes:
        scores: [N, labels], probabilities.
        logprobs: [N, labels], over the full vocabulary or all classes; None unless asked for.
        label_mass: [N], the probability of all labels of an item together; None unless `logprobs`
            was asked for.
        prompt_tokens: tokens of all prompts, each counted as a whole.
        cached_tokens: prompt tokens that were not computed again.
        logits: [N, labels], as the model's head gives them; None unless asked for.
        labels: names of the columns: the labels' texts, or their ids; empty if items have labels of
            their own.
    """

    scores: Float64Array  # [N, labels]
    logprobs: Float64Array | None  # [N, labels]
    label_mass: Float64Array | None  # [N]
    prompt_tokens: int
    cached_tokens: int
    logits: Float64Array | None = None  # [N, labels]
    labels: tuple[str, ...] = ()

    def columns(self) -> Mapping[str, Sequence[Any]]:
        width = self.scores.shape[1] if self.scores.ndim > 1 else 0
        names = self.labels or tuple(f"label {index}" for index in range(width))
        found = {name: self.scores[:, i].tolist() for i, name in enumerate(names[:width])}
        return (
            found if self.label_mass is None else found | {"label_mass": self.label_mass.tolist()}
        )


@dataclass(frozen=True, slots=True)
class Ranking(Table):
    """A ranking of documents, best first; documents with equal scores keep the given order.

    Attributes:
        indices: [n], each document's place in the given list.
        scores: [n], float64: relevance from 0 to 1, or raw scores if those were asked for.
        truncated: [n], True if the document was cut, as the call allowed.
        documents: [n], the given documents.
        prompt_tokens: tokens of all prompts, each counted as a whole.
        cached_tokens: prompt tokens that were not computed again.
    """

    indices: NDArray[np.int64]  # [n]
    scores: Float64Array  # [n]
    truncated: BoolArray  # [n]
    documents: tuple[str, ...]  # [n]
    prompt_tokens: int
    cached_tokens: int

    def columns(self) -> Mapping[str, Sequence[Any]]:
        return {
            "index": self.indices.tolist(),
            "score": self.scores.tolist(),
            "document": self.documents,
        }


@dataclass(frozen=True, slots=True)
class PairScores(Table):
    """Scores of pairs, in the given order.

    Attributes:
        scores: [N], float64: relevance from 0 to 1, or raw scores if those were asked for.
        truncated: [N], True if the document was cut, as the call allowed.
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens that were not computed again.
    """

    scores: Float64Array  # [N]
    truncated: BoolArray  # [N]
    prompt_tokens: int
    cached_tokens: int

    def columns(self) -> Mapping[str, Sequence[Any]]:
        return {"score": self.scores.tolist()}


@dataclass(frozen=True, slots=True)
class Classification(Table):
    """Classes of texts, in the given order.

    Attributes:
        classes: names of the columns.
        probabilities: [N, classes], float64.
        best: [N], the most probable class of each text.
        truncated: [N], True if the text was cut, as the call allowed.
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens that were not computed again.
    """

    classes: tuple[str, ...]
    probabilities: Float64Array  # [N, classes]
    best: tuple[str, ...]  # [N]
    truncated: BoolArray  # [N]
    prompt_tokens: int
    cached_tokens: int

    def columns(self) -> Mapping[str, Sequence[Any]]:
        columns = {name: self.probabilities[:, i].tolist() for i, name in enumerate(self.classes)}
        return {"class": self.best} | columns
