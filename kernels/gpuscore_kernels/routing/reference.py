"""Routing of rows to experts in plain torch."""

import torch
from torch import Tensor

from gpuscore_kernels.routing.layout import Routing


def route(logits: Tensor, top_k: int, norm_top_k: bool, filled: Tensor | None) -> Routing:
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
