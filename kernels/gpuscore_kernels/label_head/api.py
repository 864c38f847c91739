"""The label head: logits of a few label tokens, and the full-vocabulary log-sum-exp.

All products are float32 (float64 for float64 inputs), and the [N, V] logits never exist as a whole.
The final norm is already applied to the rows: the decoder computes it together with the last sum of
the residual stream (`add_rms_norm`).
"""

from typing import Literal, TypeAlias

from torch import Tensor

from gpuscore_kernels.label_head import reference
from gpuscore_kernels.label_head.reference import (
    MAX_TILE,
    Products,
    few_products,
    repeating_rows,
    tile_shapes,
)
from gpuscore_kernels.label_head.statistics import VocabStatistics
from gpuscore_kernels.slice_merge import MAX_TOP

__all__ = [
    "MAX_TOP",
    "Implementation",
    "Products",
    "VocabStatistics",
    "few_products",
    "label_logits",
    "repeating_rows",
    "tile_shapes",
    "vocab_statistics",
]

Implementation: TypeAlias = Literal["reference", "triton"]


def label_logits(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    label_ids: Tensor,
    *,
    softcap: float | None = None,
    max_tile: int = MAX_TILE,
    impl: Implementation,
) -> Tensor:
    """Return the logit of token `label_ids[i]` in row `rows[i]`; reads only these weight rows.

    Args:
        hidden: [N, E] after the final norm.
        weight: [V, E] of the LM head.
        rows: int [L], 0 <= rows < N.
        label_ids: int [L], 0 <= label_ids < V.
        softcap: logits z become softcap * tanh(z / softcap).
        max_tile: elements of gathered weights that the reference holds at a time.
        impl: "reference" (any device) or "triton".

    Returns:
        float [L]. Each is one dot product, so it does not depend on the other rows.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check(hidden, weight)
    if rows.shape != label_ids.shape or rows.dim() != 1:
        raise ValueError(f"{tuple(rows.shape)} rows for {tuple(label_ids.shape)} labels")
    if impl == "reference":
        return reference.label_logits(hidden, weight, rows, label_ids, softcap, max_tile)
    from gpuscore_kernels.label_head import triton

    return triton.label_logits(hidden, weight, rows, label_ids, softcap)


def vocab_statistics(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor | None = None,
    *,
    num_top: int,
    softcap: float | None = None,
    max_tile: int = MAX_TILE,
    products: Products | None = None,
    impl: Implementation,
) -> VocabStatistics:
    """Return each row's log-sum-exp over all V logits, and the largest (lower ids on a tie).

    Args:
        hidden: [N, E] after the final norm.
        weight: [V, E] of the LM head.
        rows: int [M], rows of `hidden` to compute; None = all.
        num_top: number of best tokens to return with their logits, at most MAX_TOP.
        softcap: logits z become softcap * tanh(z / softcap).
        max_tile: elements of logits and of converted weights that the reference holds at a time.
        products: of rows in float32 with tiles of weights, in place of the reference's
            `few_products`.
        impl: "reference" (any device) or "triton".

    Returns:
        lse float [M], natural log; top_ids int64 [M, num_top] and top_logits float [M, num_top],
        the largest first, or None. Places after the V-th hold -inf. The top logits are those that
        went into the log-sum-exp; `label_logits` sums the same tokens' products in another order.
        With "triton" the vocabulary is divided into slices, whose number and order of summing
        depend only on the device's architecture and the dtype.

    Raises:
        ValueError: shapes or dtypes do not fit, or `num_top` is too large.
    """
    _check(hidden, weight)
    if not 0 <= num_top <= MAX_TOP:
        raise ValueError(f"{num_top} top tokens, the limit is {MAX_TOP}")
    if impl == "reference":
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        return reference.vocab_statistics(hidden, weight, num_top, softcap, max_tile, products)
    from gpuscore_kernels.label_head import triton

    return triton.vocab_statistics(hidden, weight, rows, num_top, softcap)


def _check(hidden: Tensor, weight: Tensor) -> None:
    fits = hidden.dim() == weight.dim() == 2 and hidden.shape[1] == weight.shape[1]
    if not fits or hidden.dtype != weight.dtype:
        raise ValueError(
            f"shapes or dtypes do not fit: hidden {tuple(hidden.shape)} {hidden.dtype}, "
            f"weight {tuple(weight.shape)} {weight.dtype}"
        )
