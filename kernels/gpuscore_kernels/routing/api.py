"""Routing of rows to experts: the choice, its weights, and an order in which experts have blocks of
rows."""

from typing import Literal, TypeAlias

from torch import Tensor

from gpuscore_kernels.routing import reference
from gpuscore_kernels.routing.layout import Routing

__all__ = ["Implementation", "Routing", "route"]

Implementation: TypeAlias = Literal["reference", "triton"]


def route(
    logits: Tensor,
    *,
    top_k: int,
    norm_top_k: bool,
    filled: Tensor | None = None,
    impl: Implementation,
) -> Routing:
    """Choose the `top_k` most probable experts of each row, and give every choice a place.

    Args:
        logits: [T, experts] of the router, contiguous.
        top_k: experts of a row.
        norm_top_k: divide the weights of a row by their sum.
        filled: int32 [1]: the number of rows that are not padding; None = all. Padding comes last
            and is given no place.
        impl: "reference" (any device) or "triton", which reads no number on the host.

    Returns:
        The places, and weights that are the softmax over all experts, float32 (float64 for
        float64). Of equally probable experts "triton" chooses those of lower numbers, as torch does
        on CUDA; "reference" chooses as `torch.topk`.

    Raises:
        ValueError: shapes do not fit.
    """
    if logits.dim() != 2 or not 0 < top_k <= logits.shape[1]:
        raise ValueError(f"{top_k} experts of each row of {tuple(logits.shape)} logits")
    if filled is not None and filled.shape != (1,):
        raise ValueError(f"filled must be [1], got {tuple(filled.shape)}")
    if impl == "reference":
        return reference.route(logits, top_k, norm_top_k, filled)
    from gpuscore_kernels.routing import triton

    return triton.route(logits, top_k, norm_top_k, filled)
