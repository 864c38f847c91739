"""Reference scores for the check at start (`common/start_check`): the decoder in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.decoder import Decoder
from gpuscore.backends.torch.delta_net.layer import DeltaNetBackend
from gpuscore.backends.torch.delta_net.states import StatePool
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.backends.torch.launcher import Head, PlainLauncher
from gpuscore.backends.torch.layers import all_at_once
from gpuscore.backends.torch.operators import Operators
from gpuscore.backends.torch.weights import DecoderWeights, LayerWeights
from gpuscore.types.batch import PackedBatch, visible_rows


@dataclass(frozen=True, slots=True)
class MaskedAttention:
    """An attention backend with a mask over all pairs of rows, for batches without a cache."""

    config: DecoderConfig
    device: torch.device

    def prepare(self, batch: PackedBatch) -> "MaskedPass":
        rows = torch.from_numpy(batch.score_rows.astype(np.int64)).to(self.device)
        visible = torch.from_numpy(visible_rows(batch)).to(self.device)
        positions = torch.from_numpy(batch.positions).to(self.device)
        return MaskedPass(self.config, visible, positions[:, None] - positions, rows)


@dataclass(frozen=True, slots=True)
class MaskedPass:
    """Attention of one batch."""

    config: DecoderConfig
    visible: Tensor  # bool [T, T]
    distance: Tensor  # [T, T] position of the row minus position of the key
    scored: Tensor  # [N]

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = self.config
        visible = self.visible
        window = self.config.windows[layer]
        if window is not None:
            visible = visible & (self.distance < window)
        if layer == config.num_layers - 1:
            visible = visible[self.scored]
        group = config.num_heads // config.num_kv_heads
        keys, values = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1).float() @ keys.mT.float() * config.attention_scale
        if (cap := config.attention_softcap) is not None:
            scores = (scores / cap).tanh() * cap
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return (weights.to(v.dtype) @ values).transpose(0, 1)


def reference(
    config: DecoderConfig,
    weights: DecoderWeights,
    head: Head,
    embedding: Callable[[Tensor, Tensor], Tensor],
    dtype: torch.dtype,
) -> PlainLauncher:
    """Return a launcher that computes the model in plain torch.

    Args:
        config, weights: the model. The weights of a linear layer are converted when it runs.
        head: the label head, which takes hidden states of `dtype`.
        embedding: looks up embeddings.
        dtype: computes in this dtype, which is the weights' dtype or float32.
    """
    layers = tuple(_with_norms(layer, dtype) for layer in weights.layers)
    converted = replace(weights, layers=layers, norm=weights.norm.to(dtype))
    device = weights.embed_tokens.device
    linear = None
    if config.delta_net is not None:
        linear = DeltaNetBackend(config, StatePool(config, 1, dtype, device))
    return PlainLauncher(
        Decoder(config, converted, Operators(embedding=embedding)),
        KVPool(config, 0, 1, dtype, device=device),
        MaskedAttention(config, device),
        linear,
        head=head,
        by_rows=all_at_once,
    )


def _with_norms(layer: LayerWeights, dtype: torch.dtype) -> LayerWeights:
    """Convert a layer's norms. They are the only fields that are plain tensors."""
    parts = {field.name: getattr(layer, field.name) for field in fields(layer)}
    norms: dict[str, Any] = {n: w.to(dtype) for n, w in parts.items() if isinstance(w, Tensor)}
    return replace(layer, **norms)
