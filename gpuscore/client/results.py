"""The results of the clients' methods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpuscore.arrays import BoolArray, Float64Array

Document: TypeAlias = str | Mapping[str, Any]
Ids: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a call; if it was split, the sums of its requests.

    Attributes:
        prompt_tokens: tokens of all prompts, each counted as a whole.
        cached_tokens: prompt tokens that were not computed again.
    """

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ScoreResponse:
    """Scores as float64, with a row per item and a column per label.

    If items have label lists of different lengths, NaN fills the ends of shorter rows in `scores`
    and `label_logprobs`.

    Attributes:
        scores: [N, labels], probabilities.
        label_logprobs: [N, labels], over the full vocabulary; None unless asked for.
        label_mass: [N], the probability of all labels of an item together; None unless asked for.
        model: the name that the server answered with.
        usage: tokens of the call.
        request_ids: one per HTTP request.
    """

    scores: Float64Array  # [N, labels]
    label_logprobs: Float64Array | None  # [N, labels]
    label_mass: Float64Array | None  # [N]
    model: str
    usage: Usage
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RerankResponse:
    """A ranking, best document first; documents with equal scores keep the given order.

    Attributes:
        indices: [n], each document's place in the given list.
        scores: [n], float64.
        truncated: [n], True if the document was cut, as the request allowed.
        documents: [n], the given documents; None unless asked for.
        model: the name that the server answered with.
        usage: tokens of the call.
        request_ids: one per HTTP request.
    """

    indices: NDArray[np.int64]  # [n]
    scores: Float64Array  # [n]
    truncated: BoolArray  # [n]
    documents: tuple[Document, ...] | None  # [n]
    model: str
    usage: Usage
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A served model.

    Attributes:
        id: the name for requests.
        max_model_len: the longest prompt, in tokens; None while the model loads.
    """

    id: str
    max_model_len: int | None
