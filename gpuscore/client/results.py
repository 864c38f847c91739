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
    """Tokens of all prompts, and those not computed anew; of a split call, the sums."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ScoreResponse:
    """Scores as float64, with a row per item and a column per label.

    If items have label lists of different lengths, NaN fills the ends of shorter rows in `scores`
    and `label_logprobs`.
    """

    scores: Float64Array  # [N, labels]
    label_logprobs: Float64Array | None  # [N, labels], full vocabulary; if asked for
    label_mass: Float64Array | None  # [N]; if asked for
    model: str
    usage: Usage
    request_ids: tuple[str, ...]  # one per HTTP request


@dataclass(frozen=True, slots=True)
class RerankResponse:
    """A ranking, best document first; documents with equal scores keep the given order."""

    indices: NDArray[np.int64]  # [n] into the given documents
    scores: Float64Array  # [n]
    truncated: BoolArray  # [n] True if the document was cut, as the request allowed
    documents: tuple[Document, ...] | None  # [n]; if asked for
    model: str
    usage: Usage
    request_ids: tuple[str, ...]  # one per HTTP request


@dataclass(frozen=True, slots=True)
class Model:
    """A served model; `max_model_len` is in tokens, and None while the model loads."""

    id: str
    max_model_len: int | None
