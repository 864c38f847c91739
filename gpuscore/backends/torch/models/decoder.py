"""The decoder that all supported families share: norms, rotary attention, a gated MLP."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore.backends.torch.compiler import Compiler, eagerly
from gpuscore.backends.torch.hf_config import DecoderConfig, Mixture
from gpuscore.backends.torch.models.layers import (
    add_and_norm,
    gated,
    inverse_frequencies,
    norm_and_rotate,
    rms_norm,
    rotary_tables,
)
from gpuscore.backends.torch.models.mixture import mixture_mlp

# attend(layer, q [M, H, D], k [T, Hkv, D], v [T, Hkv, D]) -> [M, H, D]. M is T, except in the
# last layer, where q holds the scored rows only.
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class MlpWeights:
    gate_up: Tensor  # [2 I, E]
    gate_up_bias: Tensor | None
    down: Tensor  # [E, I]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    mixture: Mixture
    router: Tensor  # [experts, E]
    gate_up: Tensor  # [experts, 2 I, E]
    down: Tensor  # [experts, E, I]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: Tensor  # [E]
    qkv: Tensor  # [(H + 2 Hkv) D, E]: q rows, then k, then v
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Tensor  # [E, H D]
    o_bias: Tensor | None
    post_attention_norm: Tensor | None  # [E]
    mlp_norm: Tensor  # [E]
    mlp: MlpWeights | MixtureWeights
    post_mlp_norm: Tensor | None  # [E]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embed: Tensor  # [V, E]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [E]
    lm_head: Tensor  # [V, E]; the embedding itself where they are tied


class Decoder:
    """Weights and configuration of one model; `forward` keeps no state."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, compiler: Compiler = eagerly
    ) -> None:
        self.config = config
        self.weights = weights
        self._rms_norm = compiler(rms_norm)
        self._add_and_norm = compiler(add_and_norm)
        self._norm_and_rotate = compiler(norm_and_rotate)
        self._gated = compiler(gated)
        self.ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
        self.frequencies = {
            rope: inverse_frequencies(rope, config.head_dim, weights.embed.device)
            for rope in self.ropes
        }

    def forward(
        self, token_ids: Tensor, positions: Tensor, score_rows: Tensor, attend: Attend
    ) -> Tensor:
        """Final-norm hidden states [N, E] of `score_rows`; `attend` sees every row's k and v.

        The last layer computes keys and values of every row, because later batches may read
        them, but queries, output projection and MLP of the scored rows only.
        """
        rotary = {rope: rotary_tables(positions, f) for rope, f in self.frequencies.items()}
        x = self._embed(token_ids)
        delta: Tensor | None = None  # what the MLP before adds to x
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            x, normed = self._residual(x, delta, layer.input_norm)
            rows = score_rows if index == last else None
            q, k, v = self._qkv(layer, normed, rotary[self.ropes[index]], rows)
            attended = attend(index, q, k, v).flatten(1)
            x = x if rows is None else x.index_select(0, rows)
            delta = functional.linear(attended, layer.o, layer.o_bias)
            delta = self._post_norm(delta, layer.post_attention_norm)
            x, normed = self._residual(x, delta, layer.mlp_norm)
            delta = self._post_norm(self._mlp(layer.mlp, normed), layer.post_mlp_norm)
        return self._residual(x, delta, self.weights.final_norm)[1]

    def _residual(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta, and its norm."""
        eps, one_plus = self.config.rms_norm_eps, self.config.one_plus_norms
        if delta is None:
            return x, self._rms_norm(x, weight, eps, one_plus)
        added: tuple[Tensor, Tensor] = self._add_and_norm(x, delta, weight, eps, one_plus)
        return added

    def _embed(self, token_ids: Tensor) -> Tensor:
        x = functional.embedding(token_ids, self.weights.embed)
        if self.config.embed_scale == 1:
            return x
        # Rounded to the model's dtype first, as the models were trained.
        return x * torch.tensor(self.config.embed_scale, dtype=x.dtype, device=x.device)

    def _post_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        normed: Tensor = self._rms_norm(
            x, weight, self.config.rms_norm_eps, self.config.one_plus_norms
        )
        return normed

    def _mlp(self, mlp: MlpWeights | MixtureWeights, x: Tensor) -> Tensor:
        activation = self.config.activation
        if isinstance(mlp, MlpWeights):
            inner = self._gated(functional.linear(x, mlp.gate_up, mlp.gate_up_bias), activation)
            return functional.linear(inner, mlp.down, mlp.down_bias)
        return mixture_mlp(x, mlp.router, mlp.gate_up, mlp.down, mlp.mixture, activation)

    def _qkv(
        self,
        layer: LayerWeights,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [M, H, D] of `rows` (None = all), k and v [T, Hkv, D]; q and k rotated."""
        c = self.config
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        cos, sin = rotary
        if rows is None:
            qkv = functional.linear(x, layer.qkv, layer.qkv_bias)
            q, k, v = torch.split(qkv, [q_size, kv_size, kv_size], dim=-1)
            q_rotary = rotary
        else:
            q_bias, kv_bias = (
                (None, None)
                if layer.qkv_bias is None
                else (layer.qkv_bias[:q_size], layer.qkv_bias[q_size:])
            )
            q = functional.linear(x.index_select(0, rows), layer.qkv[:q_size], q_bias)
            k, v = functional.linear(x, layer.qkv[q_size:], kv_bias).chunk(2, dim=-1)
            q_rotary = (cos.index_select(0, rows), sin.index_select(0, rows))
        q, k, v = (
            part.reshape(len(part), part.shape[1] // c.head_dim, c.head_dim) for part in (q, k, v)
        )
        norm = c.rms_norm_eps, c.one_plus_norms
        return (
            self._norm_and_rotate(q, *q_rotary, layer.q_norm, *norm),
            self._norm_and_rotate(k, cos, sin, layer.k_norm, *norm),
            v,
        )


def weight_shapes(config: DecoderConfig) -> dict[str, torch.Size]:
    """Expected shape of each part of a checkpoint, by the names of the weight tables."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes = {
        "embed": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
        "final_norm": (hidden,),
        "input_norm": (hidden,),
        "post_attention_norm": (hidden,),
        "mlp_norm": (hidden,),
        "post_mlp_norm": (hidden,),
        "q": (q_size, hidden),
        "k": (kv_size, hidden),
        "v": (kv_size, hidden),
        "o": (hidden, q_size),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
    }
    if config.mixture is not None:
        expert = config.mixture.intermediate_size
        shapes |= {
            "router": (config.mixture.num_experts, hidden),
            "expert_gate": (expert, hidden),
            "expert_up": (expert, hidden),
            "expert_down": (hidden, expert),
        }
    biases = {f"{name}_bias": shape[:1] for name, shape in shapes.items()}
    return {name: torch.Size(shape) for name, shape in (shapes | biases).items()}
