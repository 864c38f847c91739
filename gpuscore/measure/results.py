"""What was measured: a server or a backend, with its scores of the workload."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuscore.measure.workload import Workload
from gpuscore.types.batch import Float64Array

EIGHT_BITS = ("int8", "fp8")


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute sizes of differences; all 0 if there are no differences."""

    maximum: float
    p99: float
    median: float


def errors(differences: Float64Array) -> Errors:
    """Summarise differences of any shape; NaN counts as infinite, so that no gate accepts it."""
    sizes = np.abs(differences).ravel()
    sizes = np.where(np.isnan(sizes), np.inf, sizes)
    if not sizes.size:
        return Errors(0.0, 0.0, 0.0)
    # "higher" picks a size from the data; interpolation between a number and infinity gives NaN.
    p99, median = (float(np.percentile(sizes, q, method="higher")) for q in (99, 50))
    return Errors(float(sizes.max()), p99, median)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Results as float64, one row per item; NaN fills the ends of shorter label lists."""

    values: Float64Array  # [N, L] natural logs of the scores, over the vocabulary or as softmax
    mass: Float64Array | None = None  # [N] probability of all labels together; None with softmax


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The SHA-256 digests of a model, in hexadecimal."""

    weights: str  # of names, formats, shapes and bytes of all tensors, ordered by name
    config: str  # of config.json, without fields that change no score
    tokenizer: str | None = None  # of tokenizer.json


@dataclass(frozen=True, slots=True)
class Measured:
    """A server, or a backend in process, perhaps with its scores of a workload.

    Attributes:
        name: what the tables call it.
        dtype: "float32", another format, or "unknown".
        api: name of the API that is timed.
        vocab: number of valid token ids; None: unknown.
        facts: machine, versions and settings, for people.
        workload, results: the scores, by name of the case; without a workload there are none.
        alone: largest difference in log p between items scored alone and `results`; None: no item
            was scored alone.
        deterministic: it promises the same bits in every batch.
        precision: how linear layers multiply, "full" or one of EIGHT_BITS.
        digests: those of the model's files; None: a server's files cannot be read.
    """

    name: str
    model: str
    dtype: str = "unknown"
    api: str = "score"
    vocab: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    workload: Workload | None = None
    results: Mapping[str, CaseResult] = field(default_factory=dict)
    alone: float | None = None
    deterministic: bool = False
    precision: str = "full"
    digests: Fingerprint | None = None

    @property
    def format(self) -> str:
        """The dtype, or the format of linear layers in eight bits."""
        return self.precision if self.precision in EIGHT_BITS else self.dtype


def sha256(content: bytes) -> str:
    """Return a digest in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
