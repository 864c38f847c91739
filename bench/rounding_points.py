"""A decoder in float32 that rounds where it is told to: what one rounding point does to scores.

It shares the loader of weights with gpuscore and nothing else. Products with weights are float32
products of numbers that were rounded or not, so each point is seen alone.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore.backends import plan_backend
from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.decoder import DecoderWeights, LayerWeights, MlpWeights
from gpuscore.backends.torch.layers import inverse_frequencies, rotary_tables
from gpuscore.backends.torch.linear import DenseLinear, Linear
from gpuscore.backends.torch.loader import load_weights
from gpuscore.backends.torch.plan import TorchPlan
from gpuscore.config import ModelConfig

# Numbers that a product in half precision takes or gives: to round them once is its price.
OF_PRODUCTS = {
    "norm": "the norm, as products take it",
    "qkv": "QKV product",
    "rotary": "queries and keys, as attention takes them",
    "attended": "the result of attention, as a product takes it",
    "delta": "products of o_proj and down_proj",
    "gate_up": "product of gate and up",
    "gated": "act(gate) * up, as a product takes it",
    "final norm": "the final norm, as the head takes it",
}
# Numbers that are rounded on the way to one of those.
ON_THE_WAY = {
    "norm inside": "norms of rows, before their weight",
    "heads inside": "norms of heads, before their weight",
    "heads": "norms of heads, before the rotary embedding",
    "weights": "attention weights before the product with values",
    "partial": "results of attention over the query and over the item, before their merge",
    "residual": "the residual stream, after each addition",
    "activation": "the activation, before the product with up",
}
POINTS = OF_PRODUCTS | ON_THE_WAY
OF_GPUSCORE = {*OF_PRODUCTS, "weights", "partial"}  # on a CPU; kernels and JAX merge in float32


@dataclass(frozen=True)
class Prompts:
    """A query, and items that follow it; token ids. Items are scored after their last token."""

    query: list[int]
    items: list[list[int]]
    labels: list[int]

    @property
    def tokens(self) -> int:
        return len(self.query) + sum(map(len, self.items))


class RoundedDecoder:
    """A model whose numbers are rounded to bfloat16 at chosen points, and float32 elsewhere."""

    def __init__(self, directory: Path) -> None:
        plan = plan_backend(directory, ModelConfig(str(directory), dtype="float32"))
        assert isinstance(plan, TorchPlan)
        self.config: DecoderConfig = plan.architecture.config
        device = torch.device("cpu")
        self.weights: DecoderWeights = load_weights(
            directory, plan.architecture, torch.float32, device
        )

    @torch.inference_mode()
    def score(self, prompts: Prompts, points: Collection[str]) -> Tensor:
        """Return log-probabilities [items, labels] of the labels, float64."""
        unknown = set(points) - set(POINTS)
        if unknown:
            raise ValueError(f"no rounding points: {', '.join(sorted(unknown))}")
        return _Pass(self.config, self.weights, prompts, frozenset(points)).run()


class _Pass:
    """One forward pass. The query's rows come first, then the items', padded to the longest."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        prompts: Prompts,
        points: frozenset[str],
    ) -> None:
        self.config, self.weights, self.prompts, self.points = config, weights, prompts, points
        self.length = max(map(len, prompts.items))
        self.first = len(prompts.query)

    def run(self) -> Tensor:
        items, labels = self.prompts.items, self.prompts.labels
        padded = [item + [0] * (self.length - len(item)) for item in items]
        ids = torch.tensor(self.prompts.query + [token for item in padded for token in item])
        own = torch.arange(self.first, self.first + self.length).repeat(len(items))
        positions = torch.cat((torch.arange(self.first), own))
        x = self.weights.embed[ids]
        for index, layer in enumerate(self.weights.layers):
            frequencies = inverse_frequencies(
                self.config.rope_of(index), self.config.head_dim, self.config.head_dim, x.device
            )
            x = self.layer(layer, x, *rotary_tables(positions, frequencies))
        ends = [self.first + i * self.length + len(item) - 1 for i, item in enumerate(items)]
        last = self.rounded(
            "final norm", self.norm(x[ends], self.weights.final_norm, "norm inside")
        )
        logits = last @ self.weights.lm_head.T
        return torch.log_softmax(logits.double(), dim=-1)[:, labels]

    def rounded(self, point: str, x: Tensor) -> Tensor:
        return x.bfloat16().float() if point in self.points else x

    def norm(self, x: Tensor, weight: Tensor, inside: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return self.rounded(inside, x * scale) * weight

    def layer(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.rounded("norm", self.norm(x, layer.input_norm, "norm inside"))
        qkv = self.rounded("qkv", product(layer.qkv, normed))
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        split = qkv.view(len(x), heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), dim=1)
        q, k = (
            self.rounded("rotary", self.turned(side, weight, cos, sin))
            for side, weight in zip(split, (layer.q_norm, layer.k_norm), strict=False)
        )
        attended = self.rounded("attended", self.attend(q, k, split[2]))
        x = self.added(x, product(layer.o, attended.flatten(1)))
        normed = self.rounded("norm", self.norm(x, layer.mlp_norm, "norm inside"))
        assert isinstance(layer.mlp, MlpWeights)
        gate, up = self.rounded("gate_up", product(layer.mlp.gate_up, normed)).chunk(2, dim=1)
        active = self.rounded("activation", functional.silu(gate))
        return self.added(x, product(layer.mlp.down, self.rounded("gated", active * up)))

    def added(self, x: Tensor, delta: Tensor) -> Tensor:
        return self.rounded("residual", x + self.rounded("delta", delta))

    def turned(self, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        if weight is not None:
            x = self.rounded("heads", self.norm(x, weight, "heads inside"))
        left, right = x.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [T, H, D]: over the query and, for rows of items, over their own item."""
        first, group = self.first, self.config.num_heads // self.config.num_kv_heads
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        shared = [x[:first].transpose(0, 1) for x in (k, v)]
        hidden = torch.ones(first, first, dtype=torch.bool).triu(1)
        of_query, _ = self.partial(q[:first].transpose(0, 1), *shared, hidden)
        over_query = self.partial(q[first:].transpose(0, 1), *shared, None)
        own = (x[first:].unflatten(0, (-1, self.length)).transpose(1, 2) for x in (q, k, v))
        hidden = torch.ones(self.length, self.length, dtype=torch.bool).triu(1)
        over_own = (x.transpose(0, 1).flatten(1, 2) for x in self.partial(*own, hidden))
        (a, lse_a), (b, lse_b) = over_query, over_own
        a, b = self.rounded("partial", a), self.rounded("partial", b)
        share = torch.sigmoid(lse_a - lse_b)
        of_items = a * share + b * (1 - share)
        return torch.cat((of_query, of_items), dim=1).transpose(0, 1)

    def partial(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return attention [..., M, D] and log-sum-exps [..., M, 1], as a flash kernel has them."""
        scores = q @ k.transpose(-1, -2) * self.config.attention_scale
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        most = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - most)
        total = weights.sum(-1, keepdim=True)
        return self.rounded("weights", weights) @ v / total, most + total.log()


def product(linear: Linear, x: Tensor) -> Tensor:
    assert isinstance(linear, DenseLinear)
    return functional.linear(x, linear.weight, linear.bias)
