"""Attention by FlashInfer's paged kernels; an optional package, meant for comparison.

There are two forms; both compute the mask rule (`gpuscore.types.batch.visible_rows`).

*Multi-item*: the prefix of a query and all of its items form one sequence, in FlashInfer's mask
mode for that. FlashInfer counts positions within an item from 0, where 0 is a delimiter token. We
count from 1, so there is no delimiter, and a token sees exactly the prefix and its own item. The
rule is in FlashInfer PR 1015; the known answer at start checks it. Only the paged wrapper has this
mode; the ragged one accepts the arguments and ignores them.

*Cascade*: shared keys and own segments are computed in two passes and merged.

All keys of a layer are in one buffer, in pages of one token: first the cached keys, gathered from
the pool, then the batch's own. So page numbers are the same in every layer.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.attention.flashinfer_layout import (
    Sequences,
    lay_out_cascade,
    lay_out_items,
)
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.types.batch import PackedBatch

WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer recommends
LONGEST_ITEM = 2**16 - 1  # positions are uint16

# Rows of the batch in the order of FlashInfer's query rows, [T], and the pool's slots whose keys
# come first in the buffer.
Planned = tuple[NDArray[np.int64], NDArray[np.int64]]


class Form(Protocol):
    """One of FlashInfer's wrappers; it keeps the plan of one batch at a time."""

    def plan(self, batch: PackedBatch, pool: KVPool, model: DecoderConfig) -> Planned: ...

    def run(self, q: Tensor, pages: Tensor) -> Tensor:
        """Compute one layer.

        Args:
            q: [T, H, D], in the plan's order.
            pages: [slots + T, 2, 1, Hkv, D], keys and values in pages of one token.
        """


class FlashInferItems:
    """The multi-item form."""

    def __init__(self, device: torch.device) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._device = device
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(device), "NHD")

    def plan(self, batch: PackedBatch, pool: KVPool, model: DecoderConfig) -> Planned:
        layout = lay_out_items(batch, pool.page_size)
        if layout.longest.max(initial=0) > LONGEST_ITEM:
            raise ValueError(
                f"an item has more than {LONGEST_ITEM} tokens, or all items of a request without a "
                "query have"
            )
        self._wrapper.plan(
            *_indices(layout.sequences, self._device),
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            1,
            causal=True,
            sm_scale=model.attention_scale,
            q_data_type=_name(pool.dtype),
            prefix_len_ptr=self._tensor(layout.prefix_lens, torch.uint32),
            token_pos_in_items_ptr=self._tensor(layout.positions.reshape(-1), torch.uint16),
            token_pos_in_items_len=layout.positions.shape[1],
            max_item_len_ptr=self._tensor(layout.longest, torch.uint16),
        )
        return layout.rows, layout.slots

    def run(self, q: Tensor, pages: Tensor) -> Tensor:
        return self._wrapper.run(q, pages)

    def _tensor(self, values: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(values).to(dtype).to(self._device)


class FlashInferCascade:
    """The cascade form."""

    def __init__(self, device: torch.device) -> None:
        from flashinfer import MultiLevelCascadeAttentionWrapper

        self._device = device
        self._wrapper = MultiLevelCascadeAttentionWrapper(2, _workspace(device), "NHD")

    def plan(self, batch: PackedBatch, pool: KVPool, model: DecoderConfig) -> Planned:
        layout = lay_out_cascade(batch, pool.page_size)
        shared, own = (_indices(level, self._device) for level in (layout.shared, layout.own))
        self._wrapper.plan(
            [shared[0], own[0]],
            [shared[1], own[1]],
            [shared[2], own[2]],
            [shared[3], own[3]],
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            1,
            causal=True,
            sm_scale=model.attention_scale,
            q_data_type=_name(pool.dtype),
        )
        return layout.rows, layout.slots

    def run(self, q: Tensor, pages: Tensor) -> Tensor:
        result: Tensor = self._wrapper.run(q, pages)
        return result


def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _indices(sequences: Sequences, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Starts of queries and of keys, page numbers, and the tokens in each last page."""
    some = (np.diff(sequences.starts) > 0).astype(np.int32)
    arrays = (sequences.queries, sequences.starts, sequences.keys, some)
    queries, starts, keys, last = (torch.from_numpy(x).to(device) for x in arrays)
    return queries, starts, keys, last


@dataclass(frozen=True, slots=True)
class FlashInferAttention:
    """An attention backend; batches run one after the other, so they share the form's wrapper."""

    config: DecoderConfig
    pool: KVPool
    form: Form

    def prepare(self, batch: PackedBatch) -> "FlashInferPass":
        planned = self.form.plan(batch, self.pool, self.config)
        rows, slots, scored = (
            torch.from_numpy(x.astype(np.int64)).to(self.pool.device)
            for x in (*planned, batch.score_rows)
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
        cached = self.backend.pool.read(layer, self.slots)
        pages = k.new_empty(len(self.slots) + len(k), 2, 1, *k.shape[1:])
        for side, (kept, own) in enumerate(zip(cached, (k, v), strict=True)):
            pages[: len(self.slots), side, 0] = kept.transpose(0, 1)
            pages[len(self.slots) :, side, 0] = own
        last = layer == self.backend.config.num_layers - 1
        if last:  # q holds scored rows only, FlashInfer needs whole sequences: fill in zeros
            every = q.new_zeros(len(k), *q.shape[1:])
            every[self.scored] = q
            q = every
        out = torch.empty_like(q)
        out[self.rows] = self.backend.form.run(q[self.rows], pages)
        return out[self.scored] if last else out
