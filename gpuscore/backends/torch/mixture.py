"""The MLP of a mixture of experts: every row goes through its own top-k experts."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import functional

from gpuscore.backends.common.hf_config import Mixture
from gpuscore.backends.torch.group import RankGroup
from gpuscore.backends.torch.layers import gated
from gpuscore.backends.torch.linear import Linear, PackedLinear, Products
from gpuscore_kernels import Implementation
from gpuscore_kernels.expert_mlp import by_tiles, expert_mlp, mixed
from gpuscore_kernels.routing import Routing, route


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    mixture: Mixture
    router: Tensor  # [experts, E]
    gate_up: Tensor  # [experts, 2 I, E]
    down: Tensor  # [experts, E, I]
    group: RankGroup | None = None  # each rank has some inner columns of every expert


@dataclass(frozen=True, slots=True)
class EightBitMixture:
    """A mixture whose experts are linear layers, in eight bits or as the checkpoint left them."""

    mixture: Mixture
    router: Tensor  # [experts, E]
    gate_up: tuple[Linear, ...]  # of each expert, [2 I, E]
    down: tuple[Linear, ...]  # of each expert, [E, I]


def mixture_mlp(
    weights: MixtureWeights | EightBitMixture,
    x: Tensor,
    activation: str,
    filled: Tensor | None,
    impl: Implementation,
    products: Products,
) -> Tensor:
    """Compute, per row, the sum over its chosen experts of weight * down(act(gate) * up).

    Args:
        weights: of one layer.
        x: [T, E].
        activation: of the gate, see `gated`.
        filled: int32 [1]: rows that are no padding; None = all.
        impl: of everything but the router's product; with eight bits, of routing.
        products: of experts in eight bits.

    Returns:
        [T, E] in x's dtype; weights and the sum over experts are float32.
    """
    mixture, logits = weights.mixture, functional.linear(x, weights.router.to(x.dtype))
    group = weights.group if isinstance(weights, MixtureWeights) else None
    if group is not None:  # if ranks rounded differently, they might choose different experts
        logits = group.of_first(logits)
    routing = route(
        logits,
        top_k=mixture.top_k,
        norm_top_k=mixture.norm_top_k,
        filled=filled,
        impl=impl,
    )
    if isinstance(weights, EightBitMixture):
        return _in_eight_bits(weights, x, routing, activation, products)
    mixed_rows = expert_mlp(x, routing, weights.gate_up, weights.down, activation, impl=impl)
    return mixed_rows if group is None else group.sum(mixed_rows)


def _in_eight_bits(
    weights: EightBitMixture, x: Tensor, routing: Routing, activation: str, products: Products
) -> Tensor:
    """Compute each expert's rows at once where its sums are exact, and tile by tile elsewhere.

    The activation is not exact, so it always has tiles of one size.
    """
    rows = products.unsigned(x)  # once, and not for each of a row's experts

    def compute(expert: int, numbers: Tensor) -> Tensor:
        gate_up, down = weights.gate_up[expert], weights.down[expert]
        if isinstance(gate_up, PackedLinear) and isinstance(down, PackedLinear):
            both = products(gate_up, rows.chosen(numbers))
            return products(down, by_tiles(partial(gated, activation=activation), both))

        def mlp(tile: Tensor) -> Tensor:
            return products(down, gated(products(gate_up, tile), activation=activation))

        return by_tiles(mlp, x.index_select(0, numbers))

    return mixed(compute, routing, x)
