"""A workload's results, whoever computed them, and the identity of the model."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpuscore.types.batch import Float64Array


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute sizes of differences; all 0 if there are no differences."""

    maximum: float
    p99: float
    median: float
    mean: float


def errors(differences: Float64Array) -> Errors:
    """Summarise differences of any shape; NaN counts as infinite, so that no gate accepts it."""
    sizes = np.abs(differences).ravel()
    sizes = np.where(np.isnan(sizes), np.inf, sizes)
    if not sizes.size:
        return Errors(0.0, 0.0, 0.0, 0.0)
    # "higher" picks a size from the data; interpolation between a number and infinity gives NaN.
    p99, median = (float(np.percentile(sizes, q, method="higher")) for q in (99, 50))
    return Errors(float(sizes.max()), p99, median, float(sizes.mean()))


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Results as float64, one row per item; NaN fills the ends of shorter label lists."""

    values: Float64Array  # [N, L] natural logs of the scores, over the vocabulary or as softmax
    mass: Float64Array | None  # [N] probability of all labels together; None with softmax


@dataclass(frozen=True, slots=True)
class Run:
    """The results of one scorer for a workload."""

    name: str
    dtype: str
    results: Mapping[str, CaseResult]  # by name of the case
    alone: Errors | None = None  # in log p, of items scored alone against `results`
    deterministic: bool = False
    precision: str = "full"  # of linear layers

    @property
    def in_eight_bits(self) -> bool:
        """True if weights and activations of linear layers are in eight bits."""
        return self.precision in ("int8", "fp8")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The SHA-256 digests of a model, in hexadecimal."""

    weights: str  # of names, formats, shapes and bytes of all tensors, ordered by name
    config: str  # of config.json, without fields that change no score
    tokenizer: str | None  # of tokenizer.json


def sha256(content: bytes) -> str:
    """Return a digest in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
