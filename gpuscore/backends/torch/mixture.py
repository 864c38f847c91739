"""The MLP of a mixture of experts: every row goes through its own top-k experts."""

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore.backends.common.hf_config import Mixture
from gpuscore.backends.torch.layers import gated

# Rows that an expert computes at a time. Matrix products of different numbers of rows need not be
# bitwise equal, so with a fixed number a row's result does not depend on how many rows of other
# items chose the same expert.
TILE = 32


def mixture_mlp(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, mixture: Mixture, activation: str
) -> Tensor:
    """Compute, per row, the sum over its chosen experts of weight * down(act(gate) * up).

    Args:
        x: [T, E].
        router: [experts, E].
        gate_up: [experts, 2I, E].
        down: [experts, E, I].
        mixture: sizes and routing rule.
        activation: of the gate, see `gated`.

    Returns:
        [T, E] in x's dtype; weights and the sum over experts are float32.
    """
    weights, chosen = _route(x, router, mixture)
    expert_of = chosen.flatten()  # [T * k]; place p belongs to row p // k
    order = torch.argsort(expert_of, stable=True)
    counts = torch.bincount(expert_of, minlength=mixture.num_experts).tolist()
    out = x.new_empty(len(expert_of), x.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        places = order[start : start + count]
        rows = x.index_select(0, places // mixture.top_k)
        out[places] = _expert(rows, gate_up[expert], down[expert], activation)
        start += count
    mixed = out.view(len(x), mixture.top_k, x.shape[1]).float() * weights.unsqueeze(-1)
    return mixed.sum(dim=1).to(x.dtype)


def _route(x: Tensor, router: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Return the weights, float32 [T, k], and the experts, int64 [T, k], of each row."""
    probabilities = torch.softmax(functional.linear(x, router).float(), dim=-1)
    weights, chosen = probabilities.topk(mixture.top_k, dim=-1)
    if mixture.norm_top_k:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen


def _expert(rows: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Compute one expert on rows [n, E], tile by tile; the last tile is padded with zeros."""
    count = len(rows)
    padded = functional.pad(rows, (0, 0, 0, -count % TILE))
    tiles = [
        functional.linear(gated(functional.linear(tile, gate_up), activation), down)
        for tile in torch.split(padded, TILE)
        if count
    ]
    return torch.cat(tiles)[:count] if tiles else rows
