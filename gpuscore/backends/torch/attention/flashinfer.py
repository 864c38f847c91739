"""Attention by FlashInfer's paged kernels; an optional package, meant for comparison.

A query's prefix and all of its items form one sequence. FlashInfer has a multi-item mask for such
sequences (FlashInfer PR 1015): a token sees the prefix and its own item, as the mask rule says
(`gpuscore.types.batch.visible_rows`). FlashInfer expects a delimiter token at position 0 of each
item; this module counts positions from 1, so that no delimiter is needed. The check at start would
notice a wrong mask. Only the paged wrapper has this mask; the ragged one ignores its arguments.

All keys of a layer are copied to one buffer, in pages of one token: first the cached keys from the
pool, then the keys of the batch. So page numbers are the same in every layer.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.types.batch import PackedBatch, lineage, prefix_slots

Numbers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ItemsLayout:
    """A batch as n sequences, which FlashInfer calls requests."""

    slots: Numbers  # slots of the pool whose keys come first in the buffer
    rows: Numbers  # [T] rows of the batch, in the order of the query rows
    queries: Numbers  # [n + 1] first query row of each sequence, and the end
    starts: Numbers  # [n + 1] first entry of each sequence in `keys`, and the end
    keys: Numbers  # indices into the buffer of keys
    prefix_lens: Numbers  # [n] keys of each sequence before its items
    positions: Numbers  # [n, width] position of each item token within its item, from 1
    longest: Numbers  # [n] tokens of the longest item; without a prefix, of all items


def lay_out_items(batch: PackedBatch, page_size: int) -> ItemsLayout:
    """Lay out a batch as sequences.

    A root segment and its items form one sequence: the root ends the prefix, then the items follow.
    An item that is itself a parent gets a second sequence for its children. The prefix of that
    sequence is a copy of the keys of this parent and of its ancestors.

    Without a prefix, `longest` is the length of all items together, because FlashInfer's kernels
    for Hopper would otherwise read illegal memory (seen on an H100 with FlashInfer 0.7). They skip
    the tiles between the prefix and the first key that the longest item can reach, and continue
    with the prefix's last tile. Without a prefix, that tile has number -1
    (`kv_tile_idx_decrement` in attention/hopper/mainloop_mma.cuh and both loaders).
    """
    slots = [prefix_slots(batch, request, page_size) for request in range(len(batch.prefix_lens))]
    ends = np.cumsum([0, *map(len, slots)])
    buffer = np.arange(ends[-1] + batch.num_tokens)  # indices of all keys
    cached = np.split(buffer[: ends[-1]], ends[1:-1])
    packed = buffer[ends[-1] :]
    rows = []
    keys = []
    prefix_lens = []
    positions = []
    longest = []
    groups = _groups(batch)
    roots = {p for _, p in groups if p >= 0 and batch.parent[p] < 0}
    for (request, parent), segments in groups.items():
        items = [_rows(batch, s) for s in segments if s not in roots]
        prefix = [_rows(batch, ancestor) for ancestor in lineage(batch, segments[0])]
        if not items:
            continue
        rows.append(np.concatenate([*(prefix if parent in roots else []), *items]))
        keys.append(np.concatenate([cached[request], *(packed[x] for x in (*prefix, *items))]))
        prefix_lens.append(len(cached[request]) + sum(map(len, prefix)))
        positions.append(np.concatenate([1 + np.arange(len(item)) for item in items]))
        longest.append(max(map(len, items)) if prefix_lens[-1] else sum(map(len, items)))
    width = max(map(len, positions), default=0)
    padded = [np.pad(row, (0, width - len(row))) for row in positions]
    none = np.empty(0, np.int64)
    return ItemsLayout(
        slots=np.concatenate([none, *slots]),
        rows=np.concatenate([none, *rows]),
        queries=np.cumsum([0, *map(len, rows)]),
        starts=np.cumsum([0, *map(len, keys)]),
        keys=np.concatenate([none, *keys]),
        prefix_lens=np.array(prefix_lens, np.int64),
        positions=np.array(padded, np.int64).reshape(len(padded), width),
        longest=np.array(longest, np.int64),
    )


def _groups(batch: PackedBatch) -> dict[tuple[int, int], list[int]]:
    """Group segments by the keys that they share: (request, parent)."""
    groups = defaultdict(list)
    pairs = zip(batch.request_of.tolist(), batch.parent.tolist(), strict=True)
    for segment, pair in enumerate(pairs):
        groups[pair].append(segment)
    return groups


def _rows(batch: PackedBatch, segment: int) -> Numbers:
    return np.arange(batch.cu_seqlens[segment], batch.cu_seqlens[segment + 1], dtype=np.int64)


WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer recommends
LONGEST_ITEM = 2**16 - 1  # positions are uint16


class FlashInferAttention:
    """An attention backend; batches run one after the other, so they share a wrapper."""

    def __init__(self, config: DecoderConfig, pool: KVPool) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.config = config
        self.pool = pool
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def prepare(self, batch: PackedBatch) -> "FlashInferPass":
        layout = lay_out_items(batch, self.pool.page_size)
        device = self.pool.device
        if layout.longest.max(initial=0) > LONGEST_ITEM:
            raise ValueError(
                f"an item is longer than {LONGEST_ITEM} tokens, or a request has no query and its "
                f"items have more than {LONGEST_ITEM} tokens in all"
            )

        def tensor(values: NDArray[Any], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.from_numpy(values).to(dtype).to(device)

        self.wrapper.plan(
            tensor(layout.queries, torch.int32),
            tensor(layout.starts, torch.int32),
            tensor(layout.keys, torch.int32),
            tensor(np.diff(layout.starts) > 0, torch.int32),  # the tokens in each last page
            num_qo_heads=self.config.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim_qk=self.config.head_dim,
            page_size=1,
            causal=True,
            sm_scale=self.config.attention_scale,
            q_data_type=str(self.pool.dtype).removeprefix("torch."),
            prefix_len_ptr=tensor(layout.prefix_lens, torch.uint32),
            token_pos_in_items_ptr=tensor(layout.positions.reshape(-1), torch.uint16),
            token_pos_in_items_len=layout.positions.shape[1],
            max_item_len_ptr=tensor(layout.longest, torch.uint16),
        )
        scored = tensor(batch.score_rows)
        return FlashInferPass(self, tensor(layout.rows), tensor(layout.slots), scored)


@dataclass(frozen=True, slots=True)
class FlashInferPass:
    """Attention of one batch."""

    backend: FlashInferAttention
    rows: Tensor
    slots: Tensor
    scored: Tensor

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cached = self.backend.pool.read(layer, self.slots)
        pages = k.new_empty(len(self.slots) + len(k), 2, 1, *k.shape[1:])
        for side, (cached_rows, batch_rows) in enumerate(zip(cached, (k, v), strict=True)):
            pages[: len(self.slots), side, 0] = cached_rows.transpose(0, 1)
            pages[len(self.slots) :, side, 0] = batch_rows
        last = layer == self.backend.config.num_layers - 1
        if last:  # q holds only scored rows, but FlashInfer needs whole sequences: add zeros
            all_queries = q.new_zeros(len(k), *q.shape[1:])
            all_queries[self.scored] = q
            q = all_queries
        out = torch.empty_like(q)
        out[self.rows] = self.backend.wrapper.run(q[self.rows], pages)
        return out[self.scored] if last else out
