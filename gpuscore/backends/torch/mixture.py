"""The MLP of a mixture of experts: every row goes through its own top-k experts."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from gpuscore.backends.common.hf_config import Mixture
from gpuscore_kernels.expert_mlp import expert_mlp
from gpuscore_kernels.expert_mlp.api import Implementation
from gpuscore_kernels.routing import route


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    mixture: Mixture
    router: Tensor  # [experts, E]
    gate_up: Tensor  # [experts, 2 I, E]
    down: Tensor  # [experts, E, I]


def mixture_mlp(
    weights: MixtureWeights,
    x: Tensor,
    activation: str,
    filled: Tensor | None,
    impl: Implementation,
) -> Tensor:
    """Compute, per row, the sum over its chosen experts of weight * down(act(gate) * up).

    Args:
        weights: of one layer.
        x: [T, E].
        activation: of the gate, see `gated`.
        filled: int32 [1]: rows that are no padding; None = all.
        impl: of everything but the router's product.

    Returns:
        [T, E] in x's dtype; weights and the sum over experts are float32.
    """
    mixture = weights.mixture
    routing = route(
        functional.linear(x, weights.router),
        top_k=mixture.top_k,
        norm_top_k=mixture.norm_top_k,
        filled=filled,
        impl=impl,
    )
    return expert_mlp(x, routing, weights.gate_up, weights.down, activation, impl=impl)
