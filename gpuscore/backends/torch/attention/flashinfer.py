"""Attention by FlashInfer's paged kernels; an optional package, meant for comparison.

There are two forms; both compute the mask rule (`gpuscore.batch.visible_rows`).

*Multi-item*: the prefix of a query and all of its items form one sequence, in FlashInfer's mask
mode for that. FlashInfer counts positions within an item from 0, where 0 is a delimiter token. We
count from 1, so there is no delimiter, and a token sees exactly the prefix and its own item. The
rule is in FlashInfer PR 1015; the known answer at start checks it. Only the paged wrapper has this
mode; the ragged one accepts the arguments and ignores them.

*Cascade*: shared keys and own segments are computed in two passes and merged.

All keys of a layer are in one buffer, in pages of one token: first the cached keys, gathered from
the pool, then the batch's own. So page numbers are the same in every layer.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.batch import PackedBatch, prefix_slots

WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer recommends
LONGEST_ITEM = 2**16 - 1  # positions are uint16


@dataclass(frozen=True, slots=True)
class Sequences:
    """Query rows and keys of FlashInfer's "requests", here called sequences."""

    queries: NDArray[np.int32]  # [n + 1] first query row of each sequence, and the end
    starts: NDArray[np.int32]  # [n + 1] first entry of each sequence in `keys`, and the end
    keys: NDArray[np.int32]  # places in the buffer of keys


@dataclass(frozen=True, slots=True)
class ItemsLayout:
    """A batch in the multi-item form."""

    slots: NDArray[np.int64]  # of the pool; their keys come first in the buffer
    rows: NDArray[np.int64]  # [T] rows of the batch in the order of query rows
    sequences: Sequences
    prefix_lens: NDArray[np.int64]  # [n] keys of each sequence before its items
    positions: NDArray[np.int64]  # [n, width] position in its item of each item token, from 1
    longest: NDArray[np.int64]  # [n] tokens of the longest item


@dataclass(frozen=True, slots=True)
class CascadeLayout:
    """A batch in the cascade form: first shared keys, then each row's own segment, causally."""

    slots: NDArray[np.int64]
    rows: NDArray[np.int64]
    shared: Sequences
    own: Sequences


def lay_out_items(batch: PackedBatch, page_size: int) -> ItemsLayout:
    """Lay out the multi-item form.

    A parent that has no parent itself becomes the causal end of its items' prefix. A parent that
    has one is computed as an item of that one, and its keys are repeated in its items' prefix.
    """
    slots, cached = _cached(batch, page_size)
    rows, keys, prefix_lens, positions, longest = [], [], [], [], []
    groups = _groups(batch)
    heads = {p for _, p in groups if p >= 0 and batch.parent[p] < 0}
    for (request, parent), segments in groups.items():
        items = [_rows(batch, s) for s in segments if s not in heads]
        prefix = [_rows(batch, parent)] if parent >= 0 else []
        first = prefix if parent in heads else []
        if not items:
            continue
        rows.append(np.concatenate([*first, *items]))
        keys.append(np.concatenate([cached[request], *(len(slots) + x for x in (*prefix, *items))]))
        prefix_lens.append(len(cached[request]) + sum(map(len, prefix)))
        positions.append(np.concatenate([1 + np.arange(len(item)) for item in items]))
        longest.append(max(map(len, items)))
    width = max(map(len, positions), default=0)
    padded = [np.pad(row, (0, width - len(row))) for row in positions]
    return ItemsLayout(
        slots,
        np.concatenate([np.empty(0, np.int64), *rows]),
        _sequences(rows, keys),
        np.array(prefix_lens, np.int64),
        np.array(padded, np.int64).reshape(len(padded), width),
        np.array(longest, np.int64),
    )


def lay_out_cascade(batch: PackedBatch, page_size: int) -> CascadeLayout:
    slots, cached = _cached(batch, page_size)
    segments, shared_rows, shared = [], [], []
    for (request, parent), members in _groups(batch).items():
        own = [_rows(batch, s) for s in members]
        segments += own
        before = [len(slots) + _rows(batch, parent)] if parent >= 0 else []
        shared_rows.append(np.concatenate(own))
        shared.append(np.concatenate([cached[request], *before]))
    rows = np.concatenate([np.empty(0, np.int64), *segments])
    own_keys = [len(slots) + segment for segment in segments]
    return CascadeLayout(
        slots, rows, _sequences(shared_rows, shared), _sequences(segments, own_keys)
    )


def _groups(batch: PackedBatch) -> dict[tuple[int, int], list[int]]:
    """Group segments by the keys that they share: (request, parent)."""
    groups = defaultdict(list)
    pairs = zip(batch.request_of.tolist(), batch.parent.tolist(), strict=True)
    for segment, pair in enumerate(pairs):
        groups[pair].append(segment)
    return groups


def _rows(batch: PackedBatch, segment: int) -> NDArray[np.int64]:
    return np.arange(batch.cu_seqlens[segment], batch.cu_seqlens[segment + 1], dtype=np.int64)


def _cached(
    batch: PackedBatch, page_size: int
) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """Slots of all cached prefixes, and each request's places in the buffer of keys."""
    slots = [prefix_slots(batch, request, page_size) for request in range(len(batch.prefix_lens))]
    ends = np.cumsum([0, *batch.prefix_lens.tolist()])
    numbers = [np.arange(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    return np.concatenate([np.empty(0, np.int64), *slots]), numbers


def _sequences(rows: list[NDArray[np.int64]], keys: list[NDArray[np.int64]]) -> Sequences:
    return Sequences(
        np.cumsum([0, *map(len, rows)], dtype=np.int32),
        np.cumsum([0, *map(len, keys)], dtype=np.int32),
        np.concatenate([np.empty(0, np.int64), *keys]).astype(np.int32),
    )


class FlashInfer:
    """A FlashInfer wrapper and its workspace, made once."""

    def __init__(self, device: torch.device, *, cascade: bool) -> None:
        import flashinfer

        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.device, self.cascade = device, cascade
        self.wrapper: Any = (
            flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
            if cascade
            else flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        )

    def plan_items(self, plan: ItemsLayout, model: DecoderConfig, dtype: torch.dtype) -> None:
        self.wrapper.plan(
            *self._indices(plan.sequences),
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            1,
            causal=True,
            sm_scale=model.attention_scale,
            q_data_type=dtype,
            prefix_len_ptr=self._tensor(plan.prefix_lens, torch.uint32),
            token_pos_in_items_ptr=self._tensor(plan.positions.reshape(-1), torch.uint16),
            token_pos_in_items_len=plan.positions.shape[1],
            max_item_len_ptr=self._tensor(plan.longest, torch.uint16),
        )

    def plan_cascade(self, plan: CascadeLayout, model: DecoderConfig, dtype: torch.dtype) -> None:
        levels = [self._indices(level) for level in (plan.shared, plan.own)]
        self.wrapper.plan(
            *(list(arrays) for arrays in zip(*levels, strict=True)),
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            1,
            causal=True,
            sm_scale=model.attention_scale,
            q_data_type=dtype,
        )

    def _indices(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Starts of queries and of keys, page numbers, and the tokens in each last page."""
        some = (np.diff(sequences.starts) > 0).astype(np.int32)
        arrays = (sequences.queries, sequences.starts, sequences.keys, some)
        queries, starts, keys, last = (torch.from_numpy(x).to(self.device) for x in arrays)
        return queries, starts, keys, last

    def _tensor(self, values: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(values).to(dtype).to(self.device)


@dataclass(frozen=True, slots=True)
class FlashInferAttention:
    """An attention backend; batches run one after the other, so they share the wrapper."""

    config: DecoderConfig
    pool: KVPool
    library: FlashInfer

    def prepare(self, batch: PackedBatch) -> "FlashInferPass":
        plan: ItemsLayout | CascadeLayout
        if self.library.cascade:
            plan = lay_out_cascade(batch, self.pool.page_size)
            self.library.plan_cascade(plan, self.config, self.pool.dtype)
        else:
            plan = lay_out_items(batch, self.pool.page_size)
            if plan.longest.max(initial=0) > LONGEST_ITEM:
                raise ValueError(f"an item is longer than {LONGEST_ITEM} tokens")
            self.library.plan_items(plan, self.config, self.pool.dtype)
        rows, slots, scored = (
            torch.from_numpy(x.astype(np.int64)).to(self.pool.device)
            for x in (plan.rows, plan.slots, batch.score_rows)
        )
        return FlashInferPass(self, rows, slots, scored)


@dataclass(frozen=True, slots=True)
class FlashInferPass:
    """Attention of one batch."""

    backend: FlashInferAttention
    rows: Tensor
    slots: Tensor
    scored: Tensor

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool = self.backend.pool
        cached = pool.read(layer, self.slots)
        keys = [
            torch.cat((side.transpose(0, 1), own)).unsqueeze(1)
            for side, own in zip(cached, (k, v), strict=True)
        ]
        last = layer == self.backend.config.num_layers - 1
        if last:  # q holds scored rows only, FlashInfer needs whole sequences: fill in zeros
            every = q.new_zeros(len(k), *q.shape[1:])
            every[self.scored] = q
            q = every
        out = torch.empty_like(q)
        out[self.rows] = self.backend.library.wrapper.run(q[self.rows], tuple(keys))
        return out[self.scored] if last else out
