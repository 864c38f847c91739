"""The MLP of a mixture of experts: every row goes through its own top-k experts.

All rows' choices are sorted by expert; a choice's index in that order is its place. One call of
`torch.nn.functional.grouped_mm` multiplies the rows of all experts, and on CUDA no number goes to
the host. With `--deterministic`, experts compute one after the other, in tiles of one size. So a
row's bits do not depend on how many other rows chose the same expert. Experts in INT8 do the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore.backends.common.hf_config import DecoderConfig, Mixture
from gpuscore.backends.torch.group import RankGroup
from gpuscore.backends.torch.layers import EXPERT_ROWS, in_tiles
from gpuscore.backends.torch.linear import DenseLinear, LinearWeights, PackedLinear
from gpuscore.backends.torch.operators import Operators
from gpuscore_kernels.reference import gated


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """All experts of a layer in the model's dtype."""

    gate_up: Tensor  # [experts, 2 I, E]; an expert's gate, then its up projection
    down: Tensor  # [experts, E, I]
    grouped: bool  # one call may multiply all of them

    def __iter__(self) -> Iterator[tuple[LinearWeights, LinearWeights]]:
        for gate_up, down in zip(self.gate_up, self.down, strict=True):
            yield DenseLinear(gate_up, None), DenseLinear(down, None)


# The tuple has (gate and up, down) of each expert, in INT8 or as the checkpoint stores them.
Experts: TypeAlias = DenseExperts | tuple[tuple[LinearWeights, LinearWeights], ...]


@dataclass(frozen=True, slots=True)
class MoEWeights:
    mixture: Mixture
    router: Tensor  # [experts, E]
    experts: Experts
    group: RankGroup | None = None  # each rank has some inner columns of every expert


def why_not_grouped(model: DecoderConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Say why experts compute one after the other, with waits for the host; None if they do not.

    From torch 2.13's sources (GroupedBlas.cpp, GroupedMMUtils.h): on CUDA it has a kernel for
    Hopper and one for data-centre Blackwell, and otherwise a loop whose bounds the host reads.
    """
    if model.mixture is None:
        return None
    if any(
        size * dtype.itemsize % 16 for size in (model.hidden_size, model.mixture.intermediate_size)
    ):
        return "rows of experts' weights are not multiples of 16 bytes"
    if device.type != "cuda":
        return None
    if dtype != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return (
            "torch computes mixtures of experts without waits in bfloat16 on sm_90 and sm_100 only"
        )
    return None


class MoE:
    """Computes, per row, the sum over its selected experts of weight * down(act(gate) * up).

    Args:
        activation: the experts' function, "silu" or "gelu_tanh".
        weights: the router's and experts' weights of one layer.
        operators: if they compute rows in tiles, experts compute one after the other, in tiles.
    """

    def __init__(self, activation: str, weights: MoEWeights, operators: Operators) -> None:
        self.activation = activation
        self.weights = weights
        self._gated = operators.compiler(gated)
        self._products = operators.products
        self._one_by_one = operators.in_tiles

    def __call__(self, hidden_states: Tensor, num_rows: Tensor | None = None) -> Tensor:
        """Return the results [T, E] in the rows' dtype; those of padding are arbitrary.

        Routing weights are computed in float32 and rounded to that dtype, as experts' results are.
        The sum is float32 and rounded once.

        Args:
            hidden_states: [T, E].
            num_rows: int32 [1], the number of rows before the padding; None = all rows.
        """
        mixture = self.weights.mixture
        group = self.weights.group
        router_logits = functional.linear(
            hidden_states, self.weights.router.to(hidden_states.dtype)
        )
        if group is not None:  # if ranks rounded differently, they might choose different experts
            router_logits = group.of_first(router_logits)
        routing_weights, selected_experts = choose(router_logits, mixture)
        order, ends = placed(selected_experts, mixture.num_experts, num_rows)
        results = self._experts(hidden_states.index_select(0, order // mixture.top_k), ends)
        numbers = torch.arange(len(order), device=hidden_states.device)
        places = torch.empty_like(order).scatter_(0, order, numbers).view(selected_experts.shape)
        # One call, which does not store each choice's result in float32.
        routing_weights = routing_weights.to(hidden_states.dtype)
        added = functional.embedding_bag(
            places, results, mode="sum", per_sample_weights=routing_weights
        )
        return added if group is None else group.sum(added)

    def _experts(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the result at each place; those of padding, which comes last, are arbitrary."""
        experts = self.weights.experts
        if (
            isinstance(experts, DenseExperts)
            and experts.grouped
            and not self._one_by_one
            and rows.dtype == experts.down.dtype  # the check at start also has rows in float32
        ):
            both = functional.grouped_mm(rows, experts.gate_up.mT, offs=ends)
            inner = self._gated(both, self.activation)
            return functional.grouped_mm(inner, experts.down.mT, offs=ends)
        results = torch.zeros_like(rows)
        start = 0
        for (gate_up, down), end in zip(experts, ends.tolist(), strict=True):
            if start < end:
                results[start:end] = self._one_expert(gate_up, down, rows[start:end])
            start = end
        return results

    def _one_expert(self, gate_up: LinearWeights, down: LinearWeights, rows: Tensor) -> Tensor:
        """Return the results of one expert. Sums of INT8 products are exact, so need no tiles."""
        by_tiles = in_tiles(EXPERT_ROWS)
        if isinstance(gate_up, PackedLinear) and isinstance(down, PackedLinear):
            inner = by_tiles(self._gated)(self._products(gate_up, rows), self.activation)
            return self._products(down, inner)

        def mlp(tile: Tensor) -> Tensor:
            return self._products(down, self._gated(self._products(gate_up, tile), self.activation))

        return by_tiles(mlp)(rows)


def choose(logits: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Return weights, float32 [T, k], and numbers, int64 [T, k], of each row's experts.

    Weights are the softmax over all experts.
    """
    routing_weights, selected_experts = logits.softmax(-1, dtype=torch.float32).topk(
        mixture.top_k, dim=-1
    )
    if mixture.norm_top_k:
        routing_weights = routing_weights / routing_weights.sum(dim=-1, keepdim=True)
    return routing_weights, selected_experts


def placed(
    selected_experts: Tensor, experts: int, num_rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the choice at each place, int64 [T k], and the end of each expert's places, int32.

    Row r has the choices from r k to r k + k - 1. Choices of padding come last.
    """
    if num_rows is not None:
        padding = torch.arange(len(selected_experts), device=selected_experts.device) >= num_rows
        selected_experts = selected_experts.masked_fill(padding.unsqueeze(1), experts)
    of_places, order = selected_experts.flatten().sort(stable=True)
    numbers = torch.arange(experts, device=selected_experts.device)
    return order, torch.searchsorted(of_places, numbers, right=True, out_int32=True)
