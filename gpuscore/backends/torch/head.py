"""The label head of `PlainLauncher`, of a whole vocabulary or a rank's part of it."""

from typing import Protocol

from torch import Tensor

from gpuscore_kernels.label_head import (
    Products,
    VocabStatistics,
    label_logits,
    vocab_statistics,
)
from gpuscore_kernels.label_head.api import Implementation


class Head(Protocol):
    """Computes logits of labels, and statistics over the vocabulary, of hidden states [N, E]."""

    def logits(self, hidden: Tensor, weight: Tensor, rows: Tensor, label_ids: Tensor) -> Tensor:
        """Return the logit of token `label_ids[i]` in row `rows[i]`, [L]."""

    def statistics(
        self, hidden: Tensor, weight: Tensor, rows: Tensor, num_top: int
    ) -> VocabStatistics:
        """Return log-sum-exp and most probable tokens of these rows, [M] and [M, num_top]."""


class WholeHead:
    """The head of one process.

    Args:
        impl: of its kernels.
        softcap: of its logits.
        products: of few rows, in place of the reference's.
    """

    def __init__(
        self, impl: Implementation, softcap: float | None, products: Products | None = None
    ) -> None:
        self._impl: Implementation = impl
        self._softcap = softcap
        self._products = products

    def logits(self, hidden: Tensor, weight: Tensor, rows: Tensor, label_ids: Tensor) -> Tensor:
        return label_logits(hidden, weight, rows, label_ids, softcap=self._softcap, impl=self._impl)

    def statistics(
        self, hidden: Tensor, weight: Tensor, rows: Tensor, num_top: int
    ) -> VocabStatistics:
        return vocab_statistics(
            hidden,
            weight,
            rows,
            num_top=num_top,
            softcap=self._softcap,
            products=self._products,
            impl=self._impl,
        )
