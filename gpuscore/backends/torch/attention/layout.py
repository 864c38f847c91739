"""Index tensors of one batch for attention, made once and shared by all layers of a window.

With a `Tiling` every call of an attention operator has a shape that follows from a row's own
sequence: segments fall into blocks at fixed places, rows that share keys are taken a fixed number
at a time, and so are blocks of one length. So a row's bits do not depend on what else is in the
batch, nor on which of the keys before it were computed in an earlier one.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gpuscore.batch import PackedBatch, prefix_slots

Rows: TypeAlias = Tensor | slice

# With tiling, rows and keys of a call are a multiple of it. torch's CPU operator lays the work
# spaces of its threads end to end, and MKL's products round differently at other alignments, so
# that a row's bits would depend on which thread it falls to.
ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Tiling:
    """Fixed numbers of rows; a segment begins at a multiple of `block` of its own sequence."""

    block: int  # rows that attend to each other in one causal pass; what is before them is shared
    rows: int  # of a dense pass
    group: int  # about, of all blocks of one length that are side by side


@dataclass(frozen=True, slots=True)
class DenseCall:
    """Query rows of one call; with tiling, copies of the last one follow after `count`."""

    rows: Rows
    count: int
    first_key: Tensor | None  # [rows], counted from the first shared key; None = all are seen


@dataclass(frozen=True, slots=True)
class DensePass:
    """Query rows that all see the same shared keys: cached slots, then rows of this batch."""

    calls: tuple[DenseCall, ...]
    slots: Tensor  # [P]; without those that no row's window reaches
    before: tuple[slice, ...]  # rows of a parent, and of earlier blocks of the same segment


@dataclass(frozen=True, slots=True)
class CausalGroup:
    """Whole blocks of similar length, side by side.

    Shorter ones are filled up by repeating their own last row, which no earlier row sees. In the
    last layer query rows are numbered by their place among the scored ones, and what stands for a
    row that is not scored is computed and dropped.
    """

    gather: Tensor  # [n, length] rows of the batch
    queries: Tensor  # [n, length] their query rows
    keep: Tensor  # positions in the flattened [n * length] that are wanted
    rows: Tensor  # query rows that those are
    first_key: Tensor | None  # [length]; None = no window


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """Single scored rows with the part of their own block that they see.

    With tiling, copies of the last one follow after `count`, and each is computed several times.
    """

    rows: Tensor  # [n] of the scored rows
    count: int
    times: int
    gather: Tensor  # [n, length] rows of the batch
    key_mask: Tensor  # bool [n, length]


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Index tensors of one batch; `scored` parts serve the last layer."""

    dense: tuple[DensePass, ...]
    causal: tuple[CausalGroup, ...]
    scored_dense: tuple[DensePass, ...]
    scored_causal: tuple[CausalGroup, ...]  # blocks with several scored rows
    scored: tuple[ScoredGroup, ...]  # the others


def lay_out_attention(
    batch: PackedBatch,
    page_size: int,
    window: int | None,
    device: torch.device,
    tiling: Tiling | None = None,
) -> AttentionLayout:
    """The plan of `batch` for layers whose rows see the last `window` positions (None = all)."""
    planner = _Builder(batch, page_size, window, device, tiling)
    return AttentionLayout(
        dense=tuple(planner.dense_passes(np.arange(batch.num_tokens))),
        causal=tuple(planner.causal_groups()),
        scored_dense=tuple(planner.dense_passes(batch.score_rows)),
        scored_causal=tuple(planner.scored_causal_groups()),
        scored=tuple(planner.scored_groups()),
    )


def lay_out_shared(
    batch: PackedBatch, page_size: int, window: int | None, device: torch.device
) -> tuple[tuple[DensePass, ...], tuple[DensePass, ...]]:
    """Of a plan, what is about keys that rows share: for all rows, and for the scored ones."""
    planner = _Builder(batch, page_size, window, device, None)
    return (
        tuple(planner.dense_passes(np.arange(batch.num_tokens))),
        tuple(planner.dense_passes(batch.score_rows)),
    )


class _Builder:
    """One batch divided into blocks: whole segments, or with tiling pieces of them."""

    def __init__(
        self,
        batch: PackedBatch,
        page_size: int,
        window: int | None,
        device: torch.device,
        tiling: Tiling | None,
    ) -> None:
        self.batch, self.page_size, self.window = batch, page_size, window
        self.device, self.tiling = device, tiling
        lengths = np.diff(batch.cu_seqlens)
        block = tiling.block if tiling else max(1, int(lengths.max(initial=0)))
        counts = -(-lengths // block)  # blocks of each segment
        self.segments = np.repeat(np.arange(len(lengths)), counts)
        nth = np.arange(len(self.segments)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.before = nth * block  # rows of a block's segment before it
        self.starts = batch.cu_seqlens[self.segments] + self.before
        self.lengths = np.minimum(lengths[self.segments] - self.before, block)
        self.block_of = np.repeat(np.arange(len(self.segments)), self.lengths)  # [T]
        scored = np.bincount(self.block_of[batch.score_rows], minlength=len(self.segments))
        self.several = scored > 1  # [blocks] whether more than one row of it is scored

    def dense_passes(self, rows: np.ndarray) -> Iterator[DensePass]:
        """One pass for all of `rows` that share the same keys, where there are any.

        The passes index into `rows`.
        """
        if len(rows) == 0:
            return
        blocks = self.block_of[rows]
        segments = self.segments[blocks]
        later = np.where(self.before[blocks] > 0, blocks, -1)  # sees rows of its own segment
        keys = np.stack((self.batch.request_of[segments], self.batch.parent[segments], later))
        shared, group_of_row = np.unique(keys, axis=1, return_inverse=True)
        for group, (request, parent, block) in enumerate(shared.T.tolist()):
            members = np.flatnonzero(group_of_row.reshape(-1) == group)
            first = _first_positions(self.batch.positions[rows[members]], self.window)
            slots = prefix_slots(self.batch, request, self.page_size)
            # Nobody sees the keys before it. With tiling they are masked and not left out, because
            # it depends on the other rows of the pass.
            reached = int(first.min()) if self.tiling is None else 0
            before = _without(self._before(parent, block), reached - len(slots))
            slots = slots[reached:]
            if len(slots) or before:
                masked = self.window is not None if self.tiling else first.max() > reached
                calls = tuple(self._dense_calls(members, first - reached if masked else None))
                yield DensePass(calls, _index(slots, self.device), before)

    def _before(self, parent: int, block: int) -> list[slice]:
        """Rows of this batch that are before a block's own: its parent's, then its segment's."""
        slices = []
        if parent >= 0:
            slices.append(slice(*self.batch.cu_seqlens[parent : parent + 2].tolist()))
        if block >= 0:
            start = int(self.starts[block])
            slices.append(slice(start - int(self.before[block]), start))
        return slices

    def _dense_calls(self, members: np.ndarray, edge: np.ndarray | None) -> Iterator[DenseCall]:
        if self.tiling is None:
            first_key = None if edge is None else _index(edge, self.device)
            yield DenseCall(_rows(members, self.device), len(members), first_key)
            return
        for chosen, count in _filled(np.arange(len(members)), self.tiling.rows):
            first_key = None if edge is None else _index(edge[chosen], self.device)
            yield DenseCall(_index(members[chosen], self.device), count, first_key)

    def causal_groups(self) -> Iterator[CausalGroup]:
        every = np.arange(self.batch.num_tokens)
        yield from self._causal_groups(np.arange(len(self.lengths)), every)

    def scored_causal_groups(self) -> Iterator[CausalGroup]:
        """Gathering the keys of each row, as `scored_groups` does, would take their square."""
        place = np.full(self.batch.num_tokens, -1)
        place[self.batch.score_rows] = np.arange(len(self.batch.score_rows))
        yield from self._causal_groups(np.flatnonzero(self.several), place)

    def _causal_groups(self, chosen: np.ndarray, place: np.ndarray) -> Iterator[CausalGroup]:
        """Of these blocks; `place` is where a row's query is, -1 for none."""
        for size, members, count in self._alike(self.lengths[chosen]):
            blocks = chosen[members]
            offsets = np.arange(size)
            own = self.lengths[blocks, None]
            gather = self.starts[blocks, None] + np.minimum(offsets, own - 1)
            queries = place[gather]
            keep = np.flatnonzero(((offsets < own) & (queries >= 0))[:count].reshape(-1))
            first = None
            if self.window is not None and size > self.window:
                first = _index(_first_positions(offsets, self.window), self.device)
            yield CausalGroup(
                _index(gather, self.device),
                _index(np.maximum(queries, 0), self.device),
                _index(keep, self.device),
                _index(queries.reshape(-1)[keep], self.device),
                first,
            )

    def scored_groups(self) -> Iterator[ScoredGroup]:
        alone = np.flatnonzero(~self.several[self.block_of[self.batch.score_rows]])
        last = self.batch.score_rows[alone]
        visible = last - self.starts[self.block_of[last]] + 1
        if self.window is not None:
            visible = np.minimum(visible, self.window)
        starts = last - visible + 1
        times = ALIGNED if self.tiling else 1
        for size, rows, count in self._alike(visible):
            offsets = np.arange(size)
            own = visible[rows, None]
            gather = starts[rows, None] + np.minimum(offsets, own - 1)
            yield ScoredGroup(
                _index(alone[rows], self.device),
                count,
                times,
                _index(gather, self.device),
                torch.from_numpy(offsets < own).to(self.device),
            )

    def _alike(self, lengths: np.ndarray) -> Iterator[tuple[int, np.ndarray, int]]:
        """Groups by padded length: that length, indices into `lengths`, how many are no copies."""
        groups = defaultdict(list)
        unit = ALIGNED if self.tiling else 1
        for index, length in enumerate(lengths.tolist()):
            groups[padded_length(-(-length // unit) * unit)].append(index)
        for size, members in groups.items():
            indices = np.asarray(members)
            if self.tiling is None:
                yield size, indices, len(indices)
                continue
            for chosen, count in _filled(indices, max(1, self.tiling.group // size)):
                yield size, chosen, count


def _first_positions(positions: np.ndarray, window: int | None) -> np.ndarray:
    """The first position that each row sees."""
    if window is None:
        return np.zeros(len(positions), np.int64)
    return np.maximum(positions.astype(np.int64) - window + 1, 0)


def _without(slices: list[slice], skip: int) -> tuple[slice, ...]:
    """`slices` without the first `skip` rows of them together, and without empty ones."""
    left = []
    for rows in slices:
        start = min(rows.stop, rows.start + max(0, skip))
        skip -= rows.stop - rows.start
        if rows.stop > start:
            left.append(slice(start, rows.stop))
    return tuple(left)


def _filled(indices: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, int]]:
    """`size` of them at a time, filled up by repeating the last one; and how many are no copies."""
    for start in range(0, len(indices), size):
        part = indices[start : start + size]
        yield np.pad(part, (0, size - len(part)), mode="edge"), len(part)


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
