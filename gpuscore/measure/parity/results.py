"""A workload's results, whoever computed them."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpuscore.measure.parity.metrics import Errors
from gpuscore.types.batch import Float64Array


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
    items_per_second: float | None = None
    alone: Errors | None = None  # in log p, of items scored alone against `results`
    deterministic: bool = False
    precision: str = "full"  # of linear layers

    @property
    def in_eight_bits(self) -> bool:
        """True if weights and activations of linear layers are in eight bits."""
        return self.precision in ("int8", "fp8")
