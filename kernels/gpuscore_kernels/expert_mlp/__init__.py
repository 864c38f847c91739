"""The MLPs of a mixture of experts, on rows that were routed to them.

In plain torch they are computed expert by expert, in tiles of one size. Matrix products of
different numbers of rows need not be bitwise equal. With a fixed number a row's result does not
depend on how many other rows chose the same expert.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore_kernels import Implementation, reference
from gpuscore_kernels.gated import check_activation
from gpuscore_kernels.routing import Routing

TILE = 32  # rows that an expert computes at a time

# (expert, numbers of its rows, int32 [n]) -> its results for them [n, E]
OneExpert: TypeAlias = Callable[[int, Tensor], Tensor]


def expert_mlp(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    *,
    impl: Implementation,
) -> Tensor:
    """Return, per row, the sum over its experts of weight * down(act(gate) * up).

    A row's bits do not depend on the other rows, nor on how many of them chose the same experts.

    Args:
        x: [T, E].
        routing: of these rows, see `route`.
        gate_up: [experts, 2I, E]; the gate's rows, then the up projection's.
        down: [experts, E, I]; rows may be wider than the weights with "reference".
        activation: of the gate, see `gated`.
        impl: "reference" (any device; reads the experts' numbers of rows on the host) or "triton".

    Returns:
        [T, E] in x's dtype, 0 in rows of padding. Each product is rounded to that dtype, the
        activation as in `gated`; the weighted sum is float32 and rounded once.

    Raises:
        ValueError: shapes or dtypes do not fit, or the activation is unknown.
    """
    _check(x, routing, gate_up, down, torch.float32 if impl == "reference" else x.dtype)
    check_activation(activation)
    if impl == "reference":
        return _by_definition(x, routing, gate_up, down, activation)
    from gpuscore_kernels.expert_mlp import triton

    return triton.expert_mlp(x, routing, gate_up, down, activation)


def _check(x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, widest: torch.dtype) -> None:
    experts, width, inner = down.shape
    shapes = x.shape[1:] == (width,) and gate_up.shape == (experts, 2 * inner, width)
    routed = len(routing.places) == len(x) and len(routing.starts) == experts + 1
    dtypes = gate_up.dtype == down.dtype and x.dtype in (down.dtype, widest)
    if not shapes or not routed or not dtypes:
        raise ValueError(
            f"shapes or dtypes do not fit: x {tuple(x.shape)} {x.dtype}, gate_up "
            f"{tuple(gate_up.shape)} {gate_up.dtype}, down {tuple(down.shape)} {down.dtype}, a "
            f"routing of {len(routing.places)} rows to {len(routing.starts) - 1} experts"
        )


def _by_definition(
    x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    def compute(expert: int, rows: Tensor) -> Tensor:
        mlp = partial(_mlp, gate_up=gate_up[expert], down=down[expert], activation=activation)
        return by_tiles(mlp, x.index_select(0, rows))

    return mixed(compute, routing, x)


def mixed(compute: OneExpert, routing: Routing, x: Tensor) -> Tensor:
    """Return each row's weighted sum of its experts' results, in the shape and dtype of x [T, E].

    The sum is float32 and rounded once.
    """
    bounds = routing.starts.tolist()
    out = x.new_zeros(len(routing.rows), x.shape[1])
    for expert, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if start < end:
            out[start:end] = compute(expert, routing.rows[start:end])
    # The place of padding may be any, for its weight is 0.
    results = out[routing.places.clamp_min(0).long()].to(routing.weights.dtype)
    return (results * routing.weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def by_tiles(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a function to rows [n, ...], `TILE` at a time; the last tile is filled with zeros."""
    *full, last = torch.split(rows, TILE)
    filled = functional.pad(last, (0, 0, 0, TILE - len(last)))
    return torch.cat([function(tile) for tile in (*full, filled)])[: len(rows)]


def _mlp(rows: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    inner = reference.gated(functional.linear(rows, gate_up.to(rows.dtype)), activation)
    return functional.linear(inner, down.to(rows.dtype))
