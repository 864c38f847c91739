"""Index tensors of one batch for attention, made once and shared by all layers of a window."""

from collections import defaultdict
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gpuscore.types import Int32Array, PackedBatch

Rows: TypeAlias = Tensor | slice


@dataclass(frozen=True, slots=True)
class DensePass:
    """Query rows that all see the same shared keys: cached slots, then a parent's rows."""

    rows: Rows
    slots: Tensor  # [P]; without those that no row's window reaches
    parent: slice  # rows of this batch, may be empty
    first_key: Tensor | None  # [rows], counted from the first of `slots`; None = all are seen


@dataclass(frozen=True, slots=True)
class CausalGroup:
    """Whole segments of similar length, side by side.

    Shorter ones are filled up by repeating their own last row, which no earlier row sees.
    """

    gather: Tensor  # [n, length] rows of the batch
    keep: Tensor  # positions in the flattened [n * length] that are real
    rows: Tensor  # rows of the batch that those are
    first_key: Tensor | None  # [length]; None = no window


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


def plan_attention(
    batch: PackedBatch, page_size: int, window: int | None, device: torch.device
) -> AttentionPlan:
    """The plan of `batch` for layers whose rows see the last `window` positions (None = all)."""
    lengths = np.diff(batch.cu_seqlens)
    segment_of = np.repeat(np.arange(len(lengths)), lengths)
    kept = np.flatnonzero(batch.slot_mapping >= 0)
    every_row, scored = np.arange(len(segment_of)), batch.score_rows
    return AttentionPlan(
        kept_rows=_index(kept, device),
        kept_slots=_index(batch.slot_mapping[kept], device),
        dense=_dense_passes(batch, every_row, segment_of, page_size, window, device),
        causal=_causal_groups(batch.cu_seqlens[:-1], lengths, window, device),
        scored_dense=_dense_passes(batch, scored, segment_of, page_size, window, device),
        scored=_scored_groups(batch, segment_of[scored], window, device),
    )


def _dense_passes(
    batch: PackedBatch,
    rows: np.ndarray,
    segment_of: np.ndarray,
    page_size: int,
    window: int | None,
    device: torch.device,
) -> tuple[DensePass, ...]:
    """One pass per (request, parent) that has any shared keys, over those of `rows` that see them.

    The passes index into `rows`.
    """
    if len(rows) == 0:
        return ()
    keys = np.stack((batch.request_of[segment_of[rows]], batch.parent[segment_of[rows]]))
    pairs, group_of_row = np.unique(keys, axis=1, return_inverse=True)
    passes = []
    for group, (request, parent) in enumerate(pairs.T):
        members = np.flatnonzero(group_of_row.reshape(-1) == group)
        first = _first_positions(batch.positions[rows[members]], window)
        slots = _prefix_slots(batch, int(request), page_size)
        start, stop = (0, 0) if parent < 0 else batch.cu_seqlens[parent : parent + 2]
        reached = int(first.min())  # nobody sees the keys before it
        start = min(stop, start + max(0, reached - len(slots)))
        slots = slots[reached:]
        num_keys = len(slots) + int(stop - start)
        if num_keys:
            edge = None if first.max() == reached else _index(first - reached, device)
            parent_rows = slice(int(start), int(stop))
            passes.append(
                DensePass(_rows(members, device), _index(slots, device), parent_rows, edge)
            )
    return tuple(passes)


def _first_positions(positions: np.ndarray, window: int | None) -> np.ndarray:
    """The first position that each row sees."""
    if window is None:
        return np.zeros(len(positions), np.int64)
    return np.maximum(positions.astype(np.int64) - window + 1, 0)


def _prefix_slots(batch: PackedBatch, request: int, page_size: int) -> np.ndarray:
    length = int(batch.prefix_lens[request])
    pages = batch.page_table[request, : -(-length // page_size)].astype(np.int64)
    return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:length]


def _causal_groups(
    starts: Int32Array, lengths: np.ndarray, window: int | None, device: torch.device
) -> tuple[CausalGroup, ...]:
    groups = []
    for size, segments in _by_padded_length(lengths).items():
        offsets = np.arange(size)
        own = lengths[segments, None]
        gather = starts[segments, None] + np.minimum(offsets, own - 1)
        keep = np.flatnonzero((offsets < own).reshape(-1))
        rows = gather.reshape(-1)[keep]
        first = None
        if window is not None and size > window:
            first = _index(_first_positions(offsets, window), device)
        groups.append(
            CausalGroup(_index(gather, device), _index(keep, device), _index(rows, device), first)
        )
    return tuple(groups)


def _scored_groups(
    batch: PackedBatch, segments: np.ndarray, window: int | None, device: torch.device
) -> tuple[ScoredGroup, ...]:
    visible = batch.score_rows - batch.cu_seqlens[segments] + 1
    if window is not None:
        visible = np.minimum(visible, window)
    starts = batch.score_rows - visible + 1
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
