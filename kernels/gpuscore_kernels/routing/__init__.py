"""Routing of rows to experts: the choice, its weights, and an order in which experts have blocks of
rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpuscore_kernels import Implementation


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts of a batch's rows, with their weights.

    A row makes k choices, and every choice has a *place*: the places of expert 0 come first, then
    the places of expert 1, and so on, each expert's in the order of rows. All shapes follow from
    the number of rows, whatever experts they chose.
    """

    weights: Tensor  # float [T, k]; 0 in rows of padding
    places: Tensor  # int32 [T, k]; -1 in rows of padding
    rows: Tensor  # int32 [T * k]: the row of each place; after the last place anything
    starts: Tensor  # int32 [experts + 1]: the first place of each expert, then the number of places


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
        float64). Among equally probable experts "triton" chooses the lower numbers, as torch does
        on CUDA; "reference" chooses as `torch.topk`.

    Raises:
        ValueError: shapes do not fit.
    """
    if logits.dim() != 2 or not 0 < top_k <= logits.shape[1]:
        raise ValueError(f"{top_k} experts of each row of {tuple(logits.shape)} logits")
    if filled is not None and filled.shape != (1,):
        raise ValueError(f"filled must be [1], got {tuple(filled.shape)}")
    if impl == "reference":
        return _by_definition(logits, top_k, norm_top_k, filled)
    from gpuscore_kernels.routing import triton

    return triton.route(logits, top_k, norm_top_k, filled)


def _by_definition(logits: Tensor, top_k: int, norm_top_k: bool, filled: Tensor | None) -> Routing:
    weights, chosen = choose(logits, top_k, norm_top_k)
    count, experts = logits.shape
    if filled is not None:
        padding = torch.arange(count, device=logits.device) >= filled
        weights = weights.masked_fill(padding.unsqueeze(1), 0)
        chosen = chosen.masked_fill(padding.unsqueeze(1), experts)
    expert_of = chosen.flatten()  # [T * k]; row r has r * k to r * k + k - 1
    order = torch.argsort(expert_of, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    places = places.masked_fill(expert_of == experts, -1)
    ends = torch.bincount(expert_of, minlength=experts)[:experts].cumsum(0)
    return Routing(
        weights,
        places.view(count, top_k).int(),
        (order // top_k).int(),
        torch.cat((ends.new_zeros(1), ends)).int(),
    )


def choose(logits: Tensor, top_k: int, norm_top_k: bool) -> tuple[Tensor, Tensor]:
    """Return the weights, float [T, k], and the experts, int64 [T, k], of each row."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weights, chosen = torch.softmax(wide, dim=-1).topk(top_k, dim=-1)
    if norm_top_k:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen
