"""The MLPs of a mixture of experts in plain torch: expert by expert, in tiles of one size.

Matrix products of different numbers of rows need not be bitwise equal. With a fixed number a row's
result does not depend on how many other rows chose the same expert.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore_kernels.reference import gated
from gpuscore_kernels.routing import Routing

TILE = 32  # rows that an expert computes at a time

# (expert, numbers of its rows, int32 [n]) -> its results for them [n, E]
OneExpert: TypeAlias = Callable[[int, Tensor], Tensor]


def expert_mlp(
    x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    def one(expert: int, rows: Tensor) -> Tensor:
        mlp = partial(_mlp, gate_up=gate_up[expert], down=down[expert], activation=activation)
        return by_tiles(mlp, x.index_select(0, rows))

    return mixed(one, routing, x)


def mixed(one: OneExpert, routing: Routing, x: Tensor) -> Tensor:
    """Return each row's weighted sum of its experts' results, in the shape and dtype of x [T, E].

    The sum is float32 and rounded once.
    """
    bounds = routing.starts.tolist()
    out = x.new_zeros(len(routing.rows), x.shape[1])
    for expert, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if start < end:
            out[start:end] = one(expert, routing.rows[start:end])
    # The place of padding may be any, for its weight is 0.
    results = out[routing.places.clamp_min(0).long()].to(routing.weights.dtype)
    return (results * routing.weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def by_tiles(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a function to rows [n, ...], `TILE` at a time; the last tile is filled with zeros."""
    *full, last = torch.split(rows, TILE)
    filled = functional.pad(last, (0, 0, 0, TILE - len(last)))
    return torch.cat([function(tile) for tile in (*full, filled)])[: len(rows)]


def _mlp(rows: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    return functional.linear(gated(functional.linear(rows, gate_up), activation), down)
