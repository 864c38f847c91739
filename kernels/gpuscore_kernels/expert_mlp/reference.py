"""The MLPs of a mixture of experts in plain torch: expert by expert, in tiles of one size.

Matrix products of different numbers of rows need not be bitwise equal. With a fixed number a row's
result does not depend on how many other rows chose the same expert.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore_kernels.gated.reference import gated
from gpuscore_kernels.routing import Routing

TILE = 32  # rows that an expert computes at a time


def expert_mlp(
    x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    bounds = routing.starts.tolist()
    out = x.new_zeros(len(routing.rows), x.shape[1])
    for expert, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if start < end:
            rows = x.index_select(0, routing.rows[start:end])
            out[start:end] = _expert(rows, gate_up[expert], down[expert], activation)
    # The place of padding may be any, for its weight is 0.
    mixed = out[routing.places.clamp_min(0).long()].to(routing.weights.dtype)
    return (mixed * routing.weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def _expert(rows: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Compute one expert on rows [n, E], tile by tile; the last tile is padded with zeros."""
    count = len(rows)
    padded = functional.pad(rows, (0, 0, 0, -count % TILE))
    tiles = [
        functional.linear(gated(functional.linear(tile, gate_up), activation), down)
        for tile in torch.split(padded, TILE)
    ]
    return torch.cat(tiles)[:count]
