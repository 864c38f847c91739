"""The decoder that all supported families share: pre-norm, rotary attention, SwiGLU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore.backends.torch.hf_config import DecoderConfig
from gpuscore.backends.torch.models.layers import (
    inverse_frequencies,
    rms_norm,
    rotary_tables,
    rotate,
    swiglu_mlp,
)

# attend(layer, q [M, H, D], k [T, Hkv, D], v [T, Hkv, D]) -> [M, H, D]. M is T, except in the
# last layer, where q holds the scored rows only.
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: Tensor  # [E]
    qkv: Tensor  # [(H + 2 Hkv) D, E]: q rows, then k, then v
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Tensor  # [E, H D]
    o_bias: Tensor | None
    mlp_norm: Tensor  # [E]
    gate_up: Tensor  # [2 I, E]
    gate_up_bias: Tensor | None
    down: Tensor  # [E, I]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embed: Tensor  # [V, E]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [E]
    lm_head: Tensor  # [V, E]; the embedding itself where they are tied


class Decoder:
    """Weights and configuration of one model; `forward` keeps no state."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        self.frequencies = inverse_frequencies(config, weights.embed.device)

    def forward(
        self, token_ids: Tensor, positions: Tensor, score_rows: Tensor, attend: Attend
    ) -> Tensor:
        """Final-norm hidden states [N, E] of `score_rows`; `attend` sees every row's k and v.

        The last layer computes keys and values of every row, because later batches may read
        them, but queries, output projection and MLP of the scored rows only.
        """
        rotary = rotary_tables(positions, self.frequencies)
        x = functional.embedding(token_ids, self.weights.embed)
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            rows = score_rows if index == last else None
            x = self._block(index, layer, x, rotary, rows, attend)
        return rms_norm(x, self.weights.final_norm, self.config.rms_norm_eps)

    def _block(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        rows: Tensor | None,
        attend: Attend,
    ) -> Tensor:
        eps = self.config.rms_norm_eps
        q, k, v = self._qkv(layer, rms_norm(x, layer.input_norm, eps), rotary, rows)
        attended = attend(index, q, k, v).flatten(1)
        x = x if rows is None else x.index_select(0, rows)
        x = x + functional.linear(attended, layer.o, layer.o_bias)
        normed = rms_norm(x, layer.mlp_norm, eps)
        return x + swiglu_mlp(
            normed, layer.gate_up, layer.gate_up_bias, layer.down, layer.down_bias
        )

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
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, c.rms_norm_eps)
            k = rms_norm(k, layer.k_norm, c.rms_norm_eps)
        return rotate(q, *q_rotary), rotate(k, cos, sin), v


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
        "mlp_norm": (hidden,),
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
    biases = {f"{name}_bias": shape[:1] for name, shape in shapes.items()}
    return {name: torch.Size(shape) for name, shape in (shapes | biases).items()}
