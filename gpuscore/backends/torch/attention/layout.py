"""Index tensors of one batch for attention, made once and shared by all layers with one window.

With a `Tiling`, the shape of every call of an attention operator depends on a row's own sequence
only: segments are divided into blocks at fixed places, and rows that share keys, like blocks of one
length, are computed a fixed number at a time. So a row's bits depend neither on the rest of the
batch nor on which of its keys were computed in an earlier batch.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.torch.kv_pool import Rows, index_of, rows_at, run_of
from gpuscore.types.batch import PackedBatch, prefix_slots
from gpuscore_kernels.extend_attention.layout import ancestors_from_root

# With tiling, the numbers of rows and keys of a call are multiples of this. torch's CPU operator
# puts the work spaces of its threads end to end, and MKL's products round differently at other
# alignments, so a row's bits would otherwise depend on the thread that computes it.
ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Tiling:
    """Fixed numbers of rows; every segment starts at a multiple of `block` in its sequence."""

    block: int  # rows that attend to each other in one causal pass; keys before them are shared
    rows: int  # rows of one call of a dense pass
    group: int  # approximate rows of one call of a causal pass, over several blocks


@dataclass(frozen=True, slots=True)
class DenseCall:
    """Query rows of one call; with tiling, the rows after `count` repeat the last one."""

    rows: Rows
    count: int
    first_key: Tensor | None  # [rows] first visible key among the shared ones; None = all visible


@dataclass(frozen=True, slots=True)
class DensePass:
    """Query rows that share the same keys: cached slots, then rows of this batch.

    The first pass of a row has its request's prefix and its root; each ancestor below the root has
    a pass of its own.
    """

    calls: tuple[DenseCall, ...]
    slots: Tensor  # [P]; without those outside of every row's window
    run: slice | None  # the slots, if they are consecutive and may be read in place
    before: tuple[slice, ...]  # rows of an ancestor, and of earlier blocks of the same segment


@dataclass(frozen=True, slots=True)
class CausalGroup:
    """Whole blocks of similar length, computed in one call.

    Shorter blocks are padded by repeating their own last row, which no earlier row sees. In the
    last layer, query rows are numbered by their place among the scored ones; a row that is not
    scored has a stand-in, which is computed and dropped. Consecutive rows are slices, which are
    read and written in place.
    """

    length: int  # rows of a block
    gather: Rows  # [n, length], or a slice of n * length: rows of the batch
    queries: Rows  # their query rows, in the same form
    keep: Tensor | None  # places in the flattened [n * length] whose results are kept; None = all
    rows: Rows  # query rows of those results
    first_key: Tensor | None  # [length]; None = no window


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """Single scored rows with the visible part of their own block.

    With tiling, the rows after `count` repeat the last one, and each row is computed `times` times.
    """

    rows: Tensor  # [n] places among the scored rows
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
    """Lay out `batch` for layers whose rows see the last `window` positions (None = all)."""
    planner = _Builder(batch, page_size, window, device, tiling)
    return AttentionLayout(
        dense=tuple(planner.dense_passes(np.arange(batch.num_tokens))),
        causal=tuple(planner.causal_groups()),
        scored_dense=tuple(planner.dense_passes(batch.score_rows)),
        scored_causal=tuple(planner.scored_causal_groups()),
        scored=tuple(planner.scored_groups()),
    )


class _Builder:
    """One batch divided into blocks: whole segments, or pieces of them with tiling."""

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
        self.before = nth * block  # rows of its segment before each block
        self.starts = batch.cu_seqlens[self.segments] + self.before
        self.lengths = np.minimum(lengths[self.segments] - self.before, block)
        self.block_of = np.repeat(np.arange(len(self.segments)), self.lengths)  # [T]
        scored = np.bincount(self.block_of[batch.score_rows], minlength=len(self.segments))
        self.several = scored > 1  # [blocks] true if more than one row is scored
        self.lineage = ancestors_from_root(batch.parent)
        self.apart = self._apart()

    def dense_passes(self, rows: np.ndarray) -> Iterator[DensePass]:
        """Yield one pass per group of `rows` that share keys; the passes index into `rows`."""
        if len(rows) == 0:
            return
        blocks = self.block_of[rows]
        segments = self.segments[blocks]
        above = [level[segments] for level in self.lineage]
        root, deeper = (above[0] if above else np.full(len(rows), -1)), above[1:]
        if (apart := self.apart[segments]).any():
            root, deeper = np.where(apart, -1, root), [np.where(apart, root, -1), *deeper]
        later = np.where(self.before[blocks] > 0, blocks, -1)  # sees rows of its own segment
        below = np.any([level >= 0 for level in deeper] or [np.zeros(len(rows), np.bool_)], axis=0)
        first = self.batch.request_of[segments], root, np.where(below, -1, later)
        for members, (request, ancestor, block) in _groups(*first):
            slots = prefix_slots(self.batch, request, self.page_size)
            yield from self._dense_pass(rows, members, slots, self._before(ancestor, block))
        none = np.empty(0, np.int64)
        for ancestors in deeper:
            for members, (ancestor,) in _groups(ancestors):
                if ancestor >= 0:
                    before = self._before(ancestor, -1)
                    yield from self._dense_pass(rows, members, none, before)
        for members, (block,) in _groups(np.where(below, later, -1)) if below.any() else ():
            if block >= 0:
                before = self._before(-1, block)
                yield from self._dense_pass(rows, members, none, before)

    def _apart(self) -> np.ndarray:
        """Return True for the segments whose root has a pass of its own, without the cached slots.

        Otherwise the cached slots would be read once for each of several roots, such as items with
        labels of several tokens below them. With tiling, slots and root are read as one list of
        keys.
        """
        apart, batch = np.zeros(len(self.batch.parent), np.bool_), self.batch
        if self.tiling is None and self.lineage and batch.prefix_lens.any():
            root = self.lineage[0]
            below = root >= 0
            of_roots = batch.request_of[np.unique(root[below])]
            roots = np.bincount(of_roots, minlength=len(batch.prefix_lens))
            several = (roots > 1) & (batch.prefix_lens > 0)
            apart[below] = several[batch.request_of[below]]
        return apart

    def _dense_pass(
        self,
        rows: np.ndarray,
        members: np.ndarray,
        slots: np.ndarray,
        before: list[slice],
    ) -> Iterator[DensePass]:
        """Yield the pass of rows[members] over cached slots and these rows, unless it is empty."""
        # Position of the first key: cached slots are a request's first tokens.
        start = 0 if len(slots) or not before else int(self.batch.positions[before[0].start])
        first = _first_positions(self.batch.positions[rows[members]], self.window)
        first = np.maximum(first - start, 0)
        # No row sees the keys before `reached`, so they are left out. With tiling they are masked
        # instead, because `reached` depends on the other rows of the pass.
        reached = int(first.min()) if self.tiling is None else 0
        left = _without(before, reached - len(slots))
        slots = slots[reached:]
        if len(slots) or left:
            masked = self.window is not None if self.tiling else first.max() > reached
            calls = tuple(self._dense_calls(members, first - reached if masked else None))
            run = None if self.tiling else run_of(slots)
            yield DensePass(calls, index_of(slots, self.device), run, left)

    def _before(self, ancestor: int, block: int) -> list[slice]:
        """Rows of this batch that a block sees before its own: an ancestor's, its segment's."""
        slices = []
        if ancestor >= 0:
            slices.append(slice(*self.batch.cu_seqlens[ancestor : ancestor + 2].tolist()))
        if block >= 0:
            start = int(self.starts[block])
            slices.append(slice(start - int(self.before[block]), start))
        return slices

    def _dense_calls(self, members: np.ndarray, edge: np.ndarray | None) -> Iterator[DenseCall]:
        if self.tiling is None:
            first_key = None if edge is None else index_of(edge, self.device)
            yield DenseCall(rows_at(members, self.device), len(members), first_key)
            return
        for chosen, count in _filled(np.arange(len(members)), self.tiling.rows):
            first_key = None if edge is None else index_of(edge[chosen], self.device)
            yield DenseCall(index_of(members[chosen], self.device), count, first_key)

    def causal_groups(self) -> Iterator[CausalGroup]:
        every = np.arange(self.batch.num_tokens)
        yield from self._causal_groups(np.arange(len(self.lengths)), every)

    def scored_causal_groups(self) -> Iterator[CausalGroup]:
        """Yield groups for blocks with several scored rows; their keys are gathered only once."""
        place = np.full(self.batch.num_tokens, -1)
        place[self.batch.score_rows] = np.arange(len(self.batch.score_rows))
        yield from self._causal_groups(np.flatnonzero(self.several), place)

    def _causal_groups(self, chosen: np.ndarray, place: np.ndarray) -> Iterator[CausalGroup]:
        """Yield groups of the chosen blocks; `place` is the query row of each row, -1 = none."""
        for size, members, count in self._alike(self.lengths[chosen]):
            blocks = chosen[members]
            offsets = np.arange(size)
            own = self.lengths[blocks, None]
            gather = self.starts[blocks, None] + np.minimum(offsets, own - 1)
            queries = place[gather]
            keep = np.flatnonzero(((offsets < own) & (queries >= 0))[:count].reshape(-1))
            first = None
            if self.window is not None and size > self.window:
                first = index_of(_first_positions(offsets, self.window), self.device)
            yield CausalGroup(
                size,
                self._in_place(gather),
                self._in_place(np.maximum(queries, 0)),
                None if len(keep) == gather.size else index_of(keep, self.device),
                self._in_place(queries.reshape(-1)[keep]),
                first,
            )

    def _in_place(self, indices: np.ndarray) -> Rows:
        """Return the slice of consecutive indices, else the indices as a tensor.

        With tiling always a tensor: bits may depend on where rows lie.
        """
        run = None if self.tiling else run_of(indices.reshape(-1))
        return index_of(indices, self.device) if run is None else run

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
                index_of(alone[rows], self.device),
                count,
                times,
                index_of(gather, self.device),
                torch.from_numpy(offsets < own).to(self.device),
            )

    def _alike(self, lengths: np.ndarray) -> Iterator[tuple[int, np.ndarray, int]]:
        """Yield groups of one padded length: the length, indices into `lengths`, the real count.

        With tiling, indices after the real count repeat the last; without, equal lengths stay.
        """
        groups = defaultdict(list)
        unit = ALIGNED if self.tiling else 1
        for index, length in enumerate(lengths.tolist()):
            groups[padded_length(-(-length // unit) * unit)].append(index)
        for size, members in groups.items():
            indices = np.asarray(members)
            if self.tiling is None:
                own = lengths[indices]
                yield int(own[0]) if (own == own[0]).all() else size, indices, len(indices)
                continue
            for chosen, count in _filled(indices, max(1, self.tiling.group // size)):
                yield size, chosen, count


def _groups(*keys: np.ndarray) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Yield the places at which all keys are equal, and these keys."""
    distinct, group_of = np.unique(np.stack(keys), axis=1, return_inverse=True)
    for group, key in enumerate(distinct.T.tolist()):
        yield np.flatnonzero(group_of.reshape(-1) == group), key


def _first_positions(positions: np.ndarray, window: int | None) -> np.ndarray:
    """Return the first position that each row sees."""
    if window is None:
        return np.zeros(len(positions), np.int64)
    return np.maximum(positions.astype(np.int64) - window + 1, 0)


def _without(slices: list[slice], skip: int) -> tuple[slice, ...]:
    """Drop the first `skip` rows of all slices together, and empty slices."""
    left = []
    for rows in slices:
        start = min(rows.stop, rows.start + max(0, skip))
        skip -= rows.stop - rows.start
        if rows.stop > start:
            left.append(slice(start, rows.stop))
    return tuple(left)


def _filled(indices: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield `size` indices at a time, padded by repeating the last one, and the real count."""
    for start in range(0, len(indices), size):
        part = indices[start : start + size]
        yield np.pad(part, (0, size - len(part)), mode="edge"), len(part)


def padded_length(length: int) -> int:
    """Round up to a multiple of a quarter of the next lower power of two (at least of 4)."""
    step = max(4, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step
