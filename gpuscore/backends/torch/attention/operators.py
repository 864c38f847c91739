"""The mask rule (`types.batch.visible_rows`) in passes: dense ones over shared keys, a causal
one over a row's own segment.

Every row attends causally to its own segment. Rows that see a cached prefix or a root attend to
those keys without any mask, all rows of a tree at once; each ancestor below the root is one more
pass over its descendants' rows. The results are merged by their log-sum-exp. There is no T x T
mask.

A sliding window narrows all passes. It counts positions, and the keys of a dense pass are at
consecutive positions, so the first visible key of each row says everything.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.attention.layout import (
    AttentionLayout,
    CausalGroup,
    DensePass,
    ScoredGroup,
    Tiling,
    lay_out_attention,
)
from gpuscore.backends.torch.kv_pool import KVPool, Rows
from gpuscore.types.batch import PackedBatch
from gpuscore_kernels.partial_attention import Implementation, partial_attention

# `merge_partials`, or a form of it that writes into its first two arguments and returns them.
Merge: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """Attention by torch's operators; the other attention backends are checked against it."""

    config: DecoderConfig
    pool: KVPool
    impl: Implementation
    merge: Merge
    tiling: Tiling | None = None

    def prepare(self, batch: PackedBatch) -> "TorchPass":
        pool, windows = self.pool, self.config.windows
        plans = {
            window: lay_out_attention(batch, pool.page_size, window, pool.device, self.tiling)
            for window in set(windows)
        }
        return TorchPass(self, [plans[window] for window in windows])


@dataclass(frozen=True, slots=True)
class TorchPass:
    """Attention of one batch."""

    backend: TorchAttention
    plans: list[AttentionLayout]  # of each layer

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan = self.plans[layer]
        if layer == len(self.plans) - 1:
            causal, dense = plan.scored_causal, plan.scored_dense
        else:
            causal, dense = plan.causal, plan.dense
        out = q.new_empty(q.shape)  # q may lie head by head in memory
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self._add_causal(causal, q, k, v, out, lse)
        if layer == len(self.plans) - 1:
            self._add_scored(plan.scored, q, k, v, out, lse)
        for part in dense:
            self._add_dense(layer, part, q, k, v, out, lse)
        on_cpu = self.backend.impl == "cpu"  # see `layers.mark_flaws`
        if on_cpu and not q.sum(dtype=torch.float32).isfinite():
            out.masked_fill_(~q.isfinite().all(-1, keepdim=True), torch.nan)
        return out

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, **visible: Any) -> tuple[Tensor, Tensor]:
        return partial_attention(
            q,
            k,
            v,
            scale=self.backend.config.attention_scale,
            softcap=self.backend.config.attention_softcap,
            # Keys hidden from all rows are skipped, but not with tiling: the other rows decide
            # which.
            skip_hidden=self.backend.tiling is None,
            impl=self.backend.impl,
            **visible,
        )

    def _add_causal(
        self,
        groups: Sequence[CausalGroup],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        for group in groups:
            q_g, k_g, v_g = (
                _by_head(x, rows, group.length)
                for x, rows in ((q, group.queries), (k, group.gather), (v, group.gather))
            )
            results = self._partial(q_g, k_g, v_g, causal=True, first_key=group.first_key)
            for side, result in zip((out, lse), results, strict=True):
                flat = result.transpose(1, 2).flatten(0, 1)
                side[group.rows] = flat if group.keep is None else flat[group.keep]

    def _add_scored(
        self,
        groups: Sequence[ScoredGroup],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        for group in groups:
            k_g, v_g = (x[group.gather].transpose(1, 2) for x in (k, v))
            q_g = q[group.rows].unsqueeze(2).expand(-1, -1, group.times, -1)
            o, log_sum = self._partial(q_g, k_g, v_g, key_mask=group.key_mask)
            real = group.rows[: group.count]
            out[real] = o[: group.count, :, 0]
            lse[real] = log_sum[: group.count, :, 0]

    def _add_dense(
        self, layer: int, part: DensePass, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        shared = shared_keys(self.backend.pool, layer, part, k, v)
        for call in part.calls:
            o, log_sum = self._partial(
                q[call.rows].transpose(0, 1).unsqueeze(0), *shared, first_key=call.first_key
            )
            before = out[call.rows], lse[call.rows]
            results = self.backend.merge(
                *before, o.squeeze(0).transpose(0, 1), log_sum.squeeze(0).transpose(0, 1)
            )
            if isinstance(call.rows, slice) and results[0] is before[0]:
                continue  # written in place
            real = call.rows if isinstance(call.rows, slice) else call.rows[: call.count]
            for side, merged in zip((out, lse), results, strict=True):
                side[real] = merged[: call.count]


def shared_keys(
    pool: KVPool, layer: int, part: DensePass, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Gather a dense pass's k and v, each [1, Hkv, P + rows before, D], contiguous by head.

    Consecutive slots are not copied, if they are all.
    """
    slots = part.slots if part.run is None else part.run
    cached = pool.read(layer, slots) if len(part.slots) else None
    sides = []
    for side, own in enumerate((k, v)):
        parts = [] if cached is None else [cached[side]]
        parts += [own[rows].transpose(0, 1) for rows in part.before]
        gathered = parts[0] if cached is not None and len(parts) == 1 else torch.cat(parts, dim=1)
        sides.append(gathered.unsqueeze(0))
    return sides[0], sides[1]


def _by_head(x: Tensor, rows: Rows, length: int) -> Tensor:
    """Gather rows by head: x [T, H, D] -> [n, H, length, D]; a slice is not copied."""
    if isinstance(rows, slice):
        return x[rows].view(-1, length, *x.shape[1:]).transpose(1, 2)
    return x[rows].transpose(1, 2)
