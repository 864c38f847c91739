"""The mask rule in two passes: a dense one over what is shared, a causal one over one's own.

Every row attends causally to its own segment. Rows that see a cached prefix or a parent segment
attend to those keys without any mask, all rows of a request at once, and the two results are merged
by their log-sum-exp. No T x T mask exists anywhere.

`plan_attention` turns a batch into index tensors once; all layers share them.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.types import Int32Array, PackedBatch
from gpuscore_kernels.partial_attention import merge_partials, partial_attention
from gpuscore_kernels.partial_attention.api import Implementation

Rows: TypeAlias = Tensor | slice


@dataclass(frozen=True, slots=True)
class DensePass:
    """Query rows that all see the same shared keys: cached slots, then a parent's rows."""

    rows: Rows
    slots: Tensor  # [P]
    parent: slice  # rows of this batch, may be empty


@dataclass(frozen=True, slots=True)
class CausalGroup:
    """Whole segments of similar length, side by side.

    Shorter ones are filled up by repeating their own last row, which no earlier row sees.
    """

    gather: Tensor  # [n, length] rows of the batch
    keep: Tensor  # positions in the flattened [n * length] that are real
    rows: Tensor  # rows of the batch that those are


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """Single scored rows with the part of their own segment that they see."""

    rows: Tensor  # [n] of the scored rows
    gather: Tensor  # [n, length] rows of the batch
    key_mask: Tensor  # bool [n, length]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Index tensors of one batch; `scored` parts serve the last layer."""

    kept_rows: Tensor  # rows whose k and v are stored ...
    kept_slots: Tensor  # ... and where
    dense: tuple[DensePass, ...]
    causal: tuple[CausalGroup, ...]
    scored_dense: tuple[DensePass, ...]
    scored: tuple[ScoredGroup, ...]


class ExtendAttention:
    """`attend` of one batch; passed into the model as an argument."""

    def __init__(
        self, plan: AttentionPlan, pool: KVPool, scale: float, impl: Implementation
    ) -> None:
        self.plan, self.pool, self.scale, self.impl = plan, pool, scale, impl
        self.last_layer = len(pool.layers) - 1

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan = self.plan
        if len(plan.kept_rows):
            self.pool.write(layer, plan.kept_slots, k[plan.kept_rows], v[plan.kept_rows])
        if layer == self.last_layer:
            out, lse = self._scored(q, k, v)
            dense = plan.scored_dense
        else:
            out, lse = self._causal(q, k, v)
            dense = plan.dense
        for part in dense:
            self._add_dense(layer, part, q, k, v, out, lse)
        return out

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for group in self.plan.causal:
            q_g, k_g, v_g = (_by_head(x, group.gather) for x in (q, k, v))
            o, log_sum = partial_attention(
                q_g, k_g, v_g, scale=self.scale, causal=True, impl=self.impl
            )
            out[group.rows] = o.transpose(1, 2).flatten(0, 1)[group.keep]
            lse[group.rows] = log_sum.transpose(1, 2).flatten(0, 1)[group.keep]
        return out, lse

    def _scored(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for group in self.plan.scored:
            k_g, v_g = (_by_head(x, group.gather) for x in (k, v))
            o, log_sum = partial_attention(
                q[group.rows].unsqueeze(2),
                k_g,
                v_g,
                scale=self.scale,
                key_mask=group.key_mask,
                impl=self.impl,
            )
            out[group.rows] = o.squeeze(2)
            lse[group.rows] = log_sum.squeeze(2)
        return out, lse

    def _add_dense(
        self, layer: int, part: DensePass, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        shared = self._shared_keys(layer, part, k, v)
        o, log_sum = partial_attention(
            q[part.rows].transpose(0, 1).unsqueeze(0), *shared, scale=self.scale, impl=self.impl
        )
        merged, _ = merge_partials(
            out[part.rows],
            lse[part.rows],
            o.squeeze(0).transpose(0, 1),
            log_sum.squeeze(0).transpose(0, 1),
        )
        out[part.rows] = merged

    def _shared_keys(
        self, layer: int, part: DensePass, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """k, v [1, Hkv, P + parent rows, D], contiguous."""
        own = tuple(x[part.parent].transpose(0, 1).contiguous() for x in (k, v))
        if len(part.slots):
            cached = self.pool.read(layer, part.slots)
            own = tuple(torch.cat(pair, dim=1) for pair in zip(cached, own, strict=True))
        return own[0].unsqueeze(0), own[1].unsqueeze(0)


def _by_head(x: Tensor, gather: Tensor) -> Tensor:
    """x [T, H, D] -> [n, H, length, D]."""
    return x[gather].transpose(1, 2)


def plan_attention(batch: PackedBatch, page_size: int, device: torch.device) -> AttentionPlan:
    """Index tensors of `batch`; pure bookkeeping on the host."""
    lengths = np.diff(batch.cu_seqlens)
    segment_of = np.repeat(np.arange(len(lengths)), lengths)
    scored_segments = segment_of[batch.score_rows]
    kept = np.flatnonzero(batch.slot_mapping >= 0)
    return AttentionPlan(
        kept_rows=_index(kept, device),
        kept_slots=_index(batch.slot_mapping[kept], device),
        dense=_dense_passes(batch, segment_of, page_size, device),
        causal=_causal_groups(batch.cu_seqlens[:-1], lengths, device),
        scored_dense=_dense_passes(batch, scored_segments, page_size, device),
        scored=_scored_groups(batch, scored_segments, device),
    )


def _dense_passes(
    batch: PackedBatch, segment_of_row: np.ndarray, page_size: int, device: torch.device
) -> tuple[DensePass, ...]:
    """One pass per (request, parent) that has any shared keys, over the rows that see them."""
    if len(segment_of_row) == 0:
        return ()
    keys = np.stack((batch.request_of[segment_of_row], batch.parent[segment_of_row]))
    pairs, group_of_row = np.unique(keys, axis=1, return_inverse=True)
    passes = []
    for group, (request, parent) in enumerate(pairs.T):
        start, stop = (0, 0) if parent < 0 else batch.cu_seqlens[parent : parent + 2]
        slots = _prefix_slots(batch, int(request), page_size)
        if len(slots) or stop > start:
            rows = _rows(np.flatnonzero(group_of_row.reshape(-1) == group), device)
            passes.append(DensePass(rows, _index(slots, device), slice(int(start), int(stop))))
    return tuple(passes)


def _prefix_slots(batch: PackedBatch, request: int, page_size: int) -> np.ndarray:
    length = int(batch.prefix_lens[request])
    pages = batch.page_table[request, : -(-length // page_size)].astype(np.int64)
    return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:length]


def _causal_groups(
    starts: Int32Array, lengths: np.ndarray, device: torch.device
) -> tuple[CausalGroup, ...]:
    groups = []
    for size, segments in _by_padded_length(lengths).items():
        offsets = np.arange(size)
        own = lengths[segments, None]
        gather = starts[segments, None] + np.minimum(offsets, own - 1)
        keep = np.flatnonzero((offsets < own).reshape(-1))
        rows = gather.reshape(-1)[keep]
        groups.append(
            CausalGroup(_index(gather, device), _index(keep, device), _index(rows, device))
        )
    return tuple(groups)


def _scored_groups(
    batch: PackedBatch, segments: np.ndarray, device: torch.device
) -> tuple[ScoredGroup, ...]:
    starts = batch.cu_seqlens[segments]
    visible = batch.score_rows - starts + 1
    groups = []
    for size, rows in _by_padded_length(visible).items():
        offsets = np.arange(size)
        own = visible[rows, None]
        gather = starts[rows, None] + np.minimum(offsets, own - 1)
        mask = torch.from_numpy(offsets < own).to(device)
        groups.append(ScoredGroup(_index(rows, device), _index(gather, device), mask))
    return tuple(groups)


def _by_padded_length(lengths: np.ndarray) -> dict[int, np.ndarray]:
    """Indices by padded length: at most 1/4 more than the length, so few groups, little waste."""
    groups = defaultdict(list)
    for index, length in enumerate(lengths.tolist()):
        groups[padded_length(length)].append(index)
    return {size: np.asarray(members) for size, members in groups.items()}


def padded_length(length: int) -> int:
    """Round up to a multiple of a quarter of the power of two below (at least of 4)."""
    step = max(4, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def _rows(indices: np.ndarray, device: torch.device) -> Rows:
    """A slice where the rows are consecutive, because slices are read and written in place."""
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices):
        return slice(first, last + 1)
    return _index(indices, device)


def _index(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)
