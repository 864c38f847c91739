"""Attention in two passes: a library's dense kernel over shared keys, then our own over the rest.

When many items share a long prefix, the dense pass is most of the work; it needs no mask, and
libraries compute it fastest. Our kernel then continues from its result with each row's own segment.
Together they compute the mask rule (`types.batch.visible_rows`); ancestors below a root have
dense passes of their own.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.attention.layout import lay_out_shared
from gpuscore.backends.torch.attention.operators import shared_keys
from gpuscore.backends.torch.attention.passes import DensePass
from gpuscore.backends.torch.attention.triton import build_tables, tables_of_layers
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.types.batch import PackedBatch
from gpuscore_kernels.extend_attention import DeviceTiles, upload
from gpuscore_kernels.extend_attention.api import Implementation
from gpuscore_kernels.extend_attention.config import config_for
from gpuscore_kernels.items_merge import items_merge
from gpuscore_kernels.partial_attention import merge_partials, partial_attention
from gpuscore_kernels.partial_attention.api import Implementation as DenseImplementation


def choose_dense(device: torch.device) -> DenseImplementation:
    """Return the name of the dense kernel.

    On CUDA it is FlashAttention-2, whatever the card, by torch's own operator. On Hopper torch
    would choose cuDNN, for which it builds and keeps a plan per shape (pytorch issue 154602), and
    here every batch has another shape. Its setting against that, TORCH_CUDNN_SDPA_AVOID_RECOMPILE,
    works for [B, M, H, D] in memory only, not for heads that are rows.
    """
    return "cpu" if device.type == "cpu" else "flash"


class TwoPassAttention:
    """An attention backend; on a CPU without Triton's interpreter, pass two is plain torch."""

    def __init__(self, config: DecoderConfig, pool: KVPool, dense: DenseImplementation) -> None:
        self.config, self.pool, self.dense_impl = config, pool, dense
        self.tile_config = config_for(pool.device, config.head_dim, pool.dtype)
        self.shape = self.tile_config.shape(config.num_heads // config.num_kv_heads)
        on_cpu = pool.device.type == "cpu"
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        self.merge_impl: Implementation = "reference" if on_cpu and not interpreted else "triton"

    def prepare(self, batch: PackedBatch) -> "TwoPassPass":
        config, pool = self.config, self.pool
        dense = {
            window: lay_out_shared(batch, pool.page_size, window, pool.device)
            for window in set(config.windows)
        }
        tables = build_tables(batch, config, pool.page_size, self.shape, shared=False)
        *others, last = config.windows
        return TwoPassPass(
            self,
            [*(dense[window][0] for window in others), dense[last][1]],
            tables_of_layers(config, upload(tables, pool.device)),
        )


@dataclass(frozen=True, slots=True)
class TwoPassPass:
    """Attention of one batch."""

    backend: TwoPassAttention
    dense: list[tuple[DensePass, ...]]  # per layer
    tables: list[DeviceTiles]

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config, pool = self.backend.config, self.backend.pool
        shared_out = torch.zeros_like(q)
        shared_lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        for part in self.dense[layer]:
            keys = shared_keys(pool, layer, part, k, v)
            for call in part.calls:
                out, lse = partial_attention(
                    q[call.rows].transpose(0, 1).unsqueeze(0),
                    *keys,
                    first_key=call.first_key,
                    scale=config.attention_scale,
                    softcap=config.attention_softcap,
                    impl=self.backend.dense_impl,
                )
                out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)
                if part.again:
                    before = shared_out[call.rows], shared_lse[call.rows]
                    out, lse = merge_partials(*before, out, lse)
                shared_out[call.rows], shared_lse[call.rows] = out, lse
        merged, _ = items_merge(
            q,
            k,
            v,
            shared_out,
            shared_lse,
            self.tables[layer],
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            config=self.backend.tile_config,
            impl=self.backend.merge_impl,
        )
        return merged
