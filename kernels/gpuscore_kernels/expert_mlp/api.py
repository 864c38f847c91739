"""The MLPs of a mixture of experts, on rows that were routed to them."""

from typing import Literal, TypeAlias

from torch import Tensor

from gpuscore_kernels.expert_mlp import reference
from gpuscore_kernels.gated.api import check_activation
from gpuscore_kernels.routing import Routing

Implementation: TypeAlias = Literal["reference", "triton"]


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
        down: [experts, E, I].
        activation: of the gate, see `gated`.
        impl: "reference" (any device; reads the experts' numbers of rows on the host) or "triton".

    Returns:
        [T, E] in x's dtype, 0 in rows of padding. Each product is rounded to that dtype, the
        activation as in `gated`; the weighted sum is float32 and rounded once.

    Raises:
        ValueError: shapes or dtypes do not fit, or the activation is unknown.
    """
    _check(x, routing, gate_up, down)
    check_activation(activation)
    if impl == "reference":
        return reference.expert_mlp(x, routing, gate_up, down, activation)
    from gpuscore_kernels.expert_mlp import triton

    return triton.expert_mlp(x, routing, gate_up, down, activation)


def _check(x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> None:
    experts, width, inner = down.shape
    shapes = x.shape[1:] == (width,) and gate_up.shape == (experts, 2 * inner, width)
    routed = len(routing.places) == len(x) and len(routing.starts) == experts + 1
    if not shapes or not routed or not x.dtype == gate_up.dtype == down.dtype:
        raise ValueError(
            f"shapes or dtypes do not fit: x {tuple(x.shape)} {x.dtype}, gate_up "
            f"{tuple(gate_up.shape)} {gate_up.dtype}, down {tuple(down.shape)} {down.dtype}, a "
            f"routing of {len(routing.places)} rows to {len(routing.starts) - 1} experts"
        )
