"""The LM head of a scorer: logits of a few label tokens, and the full-vocabulary log-sum-exp.

All products are float32 (float64 for float64 inputs), and [N, V] never exists. Rows come with the
final norm, which the decoder takes together with the last sum of the residual stream
(`add_rms_norm`).
"""

from typing import Literal, TypeAlias

from torch import Tensor

from gpuscore_kernels.label_head import reference
from gpuscore_kernels.label_head.reference import MAX_TILE, tile_shapes
from gpuscore_kernels.label_head.statistics import VocabStatistics

__all__ = ["Implementation", "VocabStatistics", "label_logits", "tile_shapes", "vocab_statistics"]

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
    """Logit of token `label_ids[i]` in row `rows[i]`; reads these rows of the weights only.

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
    need_top: bool,
    softcap: float | None = None,
    max_tile: int = MAX_TILE,
    impl: Implementation,
) -> VocabStatistics:
    """Log-sum-exp over all V logits of each row, and the largest with its id (lowest on a tie).

    Args:
        hidden: [N, E] after the final norm.
        weight: [V, E] of the LM head.
        rows: int [M], the rows of `hidden` that are wanted; None = all.
        need_top: whether the best token is wanted.
        softcap: logits z become softcap * tanh(z / softcap).
        max_tile: elements of logits and of converted weights that the reference holds at a time.
        impl: "reference" (any device) or "triton".

    Returns:
        lse float [M], natural log; top_ids int64 [M] and top_logits float [M], or None. The top
        logit is one of those that the log-sum-exp is of; `label_logits` of that token adds up its
        products in another order. With "triton" the vocabulary falls into slices whose number and
        order of summing depend on the device's architecture and the dtype alone.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check(hidden, weight)
    if impl == "reference":
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        return reference.vocab_statistics(hidden, weight, need_top, softcap, max_tile)
    from gpuscore_kernels.label_head import triton

    return triton.vocab_statistics(hidden, weight, rows, need_top, softcap)


def _check(hidden: Tensor, weight: Tensor) -> None:
    fits = hidden.dim() == weight.dim() == 2 and hidden.shape[1] == weight.shape[1]
    if not fits or hidden.dtype != weight.dtype:
        raise ValueError(
            f"shapes or dtypes do not fit: hidden {tuple(hidden.shape)} {hidden.dtype}, "
            f"weight {tuple(weight.shape)} {weight.dtype}"
        )
