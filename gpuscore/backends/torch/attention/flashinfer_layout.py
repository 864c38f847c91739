"""Layouts of a batch for FlashInfer's paged kernels (`flashinfer`): sequences of rows and keys."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuscore.types.batch import PackedBatch, lineage, prefix_slots


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
    longest: NDArray[np.int64]  # [n] tokens of the longest item, or of all where no prefix is


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
    has one is computed as an item of that one; its keys, and those of its ancestors, are repeated
    in its items' prefix.

    Items without a prefix count as one. Between the keys that the longest item can reach and the
    prefix, FlashInfer's kernels for Hopper skip tiles of keys: they go on with the prefix's last
    one, which has the number -1 where there is no prefix (`kv_tile_idx_decrement` in
    attention/hopper/mainloop_mma.cuh and both loaders, FlashInfer 0.7). On an H100 that is an
    access to illegal memory.
    """
    slots, cached = _cached(batch, page_size)
    rows, keys, prefix_lens, positions, longest = [], [], [], [], []
    groups = _groups(batch)
    heads = {p for _, p in groups if p >= 0 and batch.parent[p] < 0}
    for (request, parent), segments in groups.items():
        items = [_rows(batch, s) for s in segments if s not in heads]
        prefix = _rows_above(batch, segments[0])
        first = prefix if parent in heads else []
        if not items:
            continue
        rows.append(np.concatenate([*first, *items]))
        keys.append(np.concatenate([cached[request], *(len(slots) + x for x in (*prefix, *items))]))
        prefix_lens.append(len(cached[request]) + sum(map(len, prefix)))
        positions.append(np.concatenate([1 + np.arange(len(item)) for item in items]))
        longest.append(max(map(len, items)) if prefix_lens[-1] else sum(map(len, items)))
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
    for (request, _), members in _groups(batch).items():
        own = [_rows(batch, s) for s in members]
        segments += own
        before = [len(slots) + rows for rows in _rows_above(batch, members[0])]
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


def _rows_above(batch: PackedBatch, segment: int) -> list[NDArray[np.int64]]:
    return [_rows(batch, ancestor) for ancestor in lineage(batch, segment)]


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
