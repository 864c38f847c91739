"""Attention in two passes: a library's dense kernel over shared keys, then our own over the rest.

The dense pass is most of the work when many items share a long prefix, needs no mask, and is what
libraries compute fastest; our kernel then goes on from its result with each row's own segment.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from gpuscore.backends.torch.attention import shared_keys
from gpuscore.backends.torch.attention_plan import DensePass, kept, plan_shared
from gpuscore.backends.torch.attention_triton import layer_tables
from gpuscore.backends.torch.hf_config import DecoderConfig
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.types import PackedBatch
from gpuscore_kernels.extend_attention import DeviceTiles
from gpuscore_kernels.extend_attention.api import Implementation
from gpuscore_kernels.extend_attention.config import config_for
from gpuscore_kernels.items_merge import items_merge
from gpuscore_kernels.partial_attention import partial_attention
from gpuscore_kernels.partial_attention.api import Implementation as DenseImplementation


class TwoPassAttention:
    """An attention backend; on a CPU without Triton's interpreter, pass two is plain torch."""

    def __init__(self, config: DecoderConfig, pool: KVPool) -> None:
        self.config, self.pool = config, pool
        self.tile_config = config_for(pool.device, config.head_dim, pool.dtype)
        on_cpu = pool.device.type == "cpu"
        self.dense_impl: DenseImplementation = "cpu" if on_cpu else "flash"
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        self.merge_impl: Implementation = "reference" if on_cpu and not interpreted else "triton"

    def plan(self, batch: PackedBatch) -> "PlannedTwoPass":
        config, pool = self.config, self.pool
        dense = {
            window: plan_shared(batch, pool.page_size, window, pool.device)
            for window in set(config.windows)
        }
        *others, last = config.windows
        return PlannedTwoPass(
            self,
            [*(dense[window][0] for window in others), dense[last][1]],
            layer_tables(batch, config, pool, self.tile_config, shared=False),
            *kept(batch, pool.device),
        )


@dataclass(frozen=True, slots=True)
class PlannedTwoPass:
    """Attention of one batch."""

    backend: TwoPassAttention
    dense: list[tuple[DensePass, ...]]  # of each layer
    tables: list[DeviceTiles]
    kept_rows: Tensor
    kept_slots: Tensor

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config, pool = self.backend.config, self.backend.pool
        if len(self.kept_rows):
            pool.write(layer, self.kept_slots, k[self.kept_rows], v[self.kept_rows])
        shared_out = torch.empty_like(q)
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
                shared_out[call.rows] = out.squeeze(0).transpose(0, 1)
                shared_lse[call.rows] = lse.squeeze(0).transpose(0, 1)
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
