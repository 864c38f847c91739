"""What the methods of a client return."""

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
    """Tokens of all prompts, and how many of them were not computed again. Of a split call the
    sum over its requests."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ScoreResponse:
    """Rows belong to items, columns to labels; float64.

    With one list of labels per item, of different lengths, `scores` and `label_logprobs` are filled
    up with NaN on the right.
    """

    scores: Float64Array  # [N, labels]
    label_logprobs: Float64Array | None  # [N, labels], full vocabulary; if asked for
    label_mass: Float64Array | None  # [N]; if asked for
    model: str
    usage: Usage
    request_ids: tuple[str, ...]  # one per HTTP request


@dataclass(frozen=True, slots=True)
class RerankResponse:
    """Best first, equal ones in the order in which they were given."""

    indices: NDArray[np.int64]  # [n] of the documents as given
    scores: Float64Array  # [n]
    truncated: BoolArray  # [n] whether the document was cut, as the request allowed
    documents: tuple[Document, ...] | None  # [n]; if asked for
    model: str
    usage: Usage
    request_ids: tuple[str, ...]  # one per HTTP request


@dataclass(frozen=True, slots=True)
class Model:
    """A served model; `max_model_len` in tokens, None while it loads."""

    id: str
    max_model_len: int | None
