"""Tables of one batch for linear layers, made once and shared by all of them.

A segment is divided into chunks of consecutive rows, also after each row whose state is kept, and
walked from chunk to chunk. It begins with the state at the end of its segment's parent, or with a
kept state, or with zeros, so the depth of a segment in its tree is its walk's level.

Segments of one depth and beginning that nothing follows share chunks, so their walks are one: few
rows in a chunk cost as much as many. The C functions do not know such chunks.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpuscore.types.batch import Int32Array, PackedBatch
from gpuscore_kernels.delta_net import CHUNK_SIZE, Walks
from gpuscore_kernels.extend_attention import aligned, word_slices

HELD, KEPT = 16, 32  # states of a batch that runs as a graph


@dataclass(frozen=True, slots=True)
class StateTables:
    """Tables of one batch, int32; `gpuscore_kernels.delta_net` says what places are.

    Args:
        places: [T, kernel - 1] of the rows that each row's convolution sees before itself.
        kept: [K, kernel] slots of tails, and places of the rows that go into each. The first
            `early` ones need rows of another slot, which later ones may overwrite.
        chunks, begins, walks: the fields of `Walks`.
        levels: how many walks each level has: at each depth those that go on, and the others.
        held: how many states are held.
        early: see `kept`.
    """

    places: Int32Array
    kept: Int32Array
    chunks: Int32Array
    begins: Int32Array
    walks: Int32Array
    levels: tuple[int, ...]
    held: int
    early: int

    @property
    def sizes(self) -> "StateSizes":
        rows, before = self.places.shape
        kept = len(self.kept)
        chunks = len(self.chunks) - 1
        return StateSizes(
            rows, before, chunks, self.levels, held=self.held, kept=kept, early=self.early
        )

    def on(self, device: torch.device) -> "DeltaLayout":
        """Upload the tables."""
        places = StatePlaces.of(self.sizes, 0)
        words = np.empty(places.end, np.int32)
        places.write(self, words)
        return places.on_device(torch.from_numpy(words).to(device))


@dataclass(frozen=True, slots=True)
class DeltaLayout:
    """The tables on the device; those of `kept` in the order in which they are to be kept."""

    places: Tensor
    kept: tuple[Tensor, ...]
    walks: Walks


class StateSizes(NamedTuple):
    """Numbers of entries that the tables of a batch have, or have room for."""

    rows: int
    before: int  # rows that a convolution sees before its own
    chunks: int
    levels: tuple[int, ...]
    held: int
    kept: int
    early: int

    def fit(self, largest: "StateSizes") -> bool:
        """True if tables of these sizes can be written in the places of the largest ones."""
        pairs = zip((*self.counts, *self.levels), (*largest.counts, *largest.levels), strict=False)
        return len(self.levels) <= len(largest.levels) and all(a <= b for a, b in pairs)

    @property
    def counts(self) -> tuple[int, ...]:
        return self.rows, self.chunks, self.held, self.kept, self.early


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """Places of tables in a buffer of words; they depend on sizes only."""

    sizes: StateSizes
    parts: tuple[slice, ...]  # of `StateTables`, in its order
    end: int

    @staticmethod
    def of(sizes: StateSizes, start: int) -> "StatePlaces":
        rows, before, chunks, levels, _, kept, _ = sizes
        counts = rows * before, kept * (before + 1), 4 * (chunks + 1), rows, 3 * sum(levels)
        parts = word_slices(counts, start)
        return StatePlaces(sizes, tuple(parts), aligned(parts[-1].stop))

    def write(self, tables: StateTables, words: Int32Array) -> None:
        """Write the tables, padded with chunks, walks and tails that do nothing."""
        lists = tables.places, tables.kept, tables.chunks, tables.begins
        fillings = -1, -1, tables.chunks[-1], 0  # chunks of no rows
        for part, table, filling in zip(self.parts, lists, fillings, strict=False):
            to = words[part].reshape(-1, *table.shape[1:])
            to[: len(table)] = table
            to[len(table) :] = filling
        walks = words[self.parts[-1]].reshape(-1, 3)
        walks[:] = 0, 0, -1
        start = first = 0
        for size, count in zip(self.sizes.levels, tables.levels, strict=False):
            walks[start : start + count] = tables.walks[first : first + count]
            start = start + size
            first = first + count

    def on_device(self, words: Tensor) -> DeltaLayout:
        """Return the tables that are in these words."""
        before = self.sizes.before
        early = self.sizes.early
        places, kept, chunks, begins, walks = (words[part] for part in self.parts)
        kept = kept.view(-1, before + 1)
        parts = tuple(part for part in (kept[:early], kept[early:]) if part.shape[0])
        counts = self.sizes.levels, self.sizes.held
        chains = Walks(chunks.view(-1, 4), walks.view(-1, 3), begins, *counts)
        return DeltaLayout(places.view(-1, before), parts, chains)


def largest_sizes(tokens: int, scored: int, kernel: int) -> StateSizes:
    """Return the sizes of a graph's tables.

    They are enough for queries and their items, or items of cached queries, with that many tokens
    and scored rows, for few kept states, and for few queries with items.
    """
    chunks = min(tokens, tokens // CHUNK_SIZE + 2 * scored + KEPT)
    going_on = min(scored, tokens // CHUNK_SIZE + HELD + KEPT)
    levels = going_on, scored, going_on, scored
    return StateSizes(tokens, kernel - 1, chunks, levels, held=HELD, kept=KEPT, early=0)


def lay_out_states(batch: PackedBatch, kernel: int, share: bool) -> StateTables:
    """Lay out `batch` for convolutions of `kernel` tokens, with chunks that siblings share or not.

    Raises:
        ValueError: the state after a cached prefix is missing, or overwritten for others.
    """
    _check(batch)
    bounds = batch.cu_seqlens
    parent = batch.parent
    own = np.arange(batch.num_tokens)
    root = np.where(batch.prefix_lens > 0, batch.prefix_states, -1)[batch.request_of]
    tail = np.where(root >= 0, -1 - (root + 1) * (kernel - 1), -1)  # its last row
    before = own - 1
    before[bounds[:-1]] = np.where(parent >= 0, bounds[parent + 1] - 1, tail)
    seen = [own]
    for _ in range(kernel - 1):
        last = seen[0]
        behind = np.where(last < -1, last + 1, -1)
        seen.insert(0, np.where(last >= 0, before[np.maximum(last, 0)], behind))
    places = np.stack(seen, axis=1)
    kept = np.column_stack((batch.state_slots, places[batch.state_rows, 1:]))
    theirs = kept[:, 1:] < -1
    foreign = theirs & ((-2 - kept[:, 1:]) // (kernel - 1) != kept[:, :1])
    early = foreign.any(axis=1)

    inner = np.unique(parent[parent >= 0])
    of_segment = np.zeros(len(parent), np.int64)
    of_segment[inner] = -2 - np.arange(len(inner))
    depth = np.zeros(len(parent), np.int64)
    above = parent
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, parent[above], -1)
    sources = np.where(parent >= 0, of_segment[parent], root)
    goes_on = np.diff(bounds) > CHUNK_SIZE
    goes_on[inner] = True
    goes_on[np.searchsorted(bounds, batch.state_rows, side="right") - 1] = True
    alike = np.column_stack((depth, sources, batch.request_of, goes_on))
    opens = _opens(bounds, alike, share)  # the segments with which walks begin

    walked = np.append(bounds[opens], bounds[-1])
    starts = _starts(walked, batch.state_rows)
    first = np.searchsorted(starts, walked)
    chunks = np.full((len(starts), 4), -1)
    chunks[:, 0] = starts
    begins = np.maximum(
        np.repeat(starts[:-1], np.diff(starts)), np.repeat(bounds[:-1], np.diff(bounds))
    )
    last = np.searchsorted(starts, bounds[inner + 1]) - 1
    ends = np.searchsorted(starts, batch.state_rows, side="right") - 1
    targets = zip((*last, *ends), (*of_segment[inner], *batch.state_slots), strict=True)
    for chunk, place in targets:
        free = np.flatnonzero(chunks[chunk] == -1)
        chunks[chunk, free[0]] = place
    walks = np.column_stack((first[:-1], first[1:], sources[opens]))
    level = 2 * depth[opens] + ~goes_on[opens]
    arrays = (
        places[:, :-1],
        np.concatenate((kept[early], kept[~early])),
        chunks,
        begins,
        walks[np.argsort(level, kind="stable")],
    )
    levels = tuple(np.bincount(level).tolist())
    places, kept, chunks, begins, walks = (np.ascontiguousarray(x, dtype=np.int32) for x in arrays)
    counts = {"held": len(inner), "early": int(early.sum())}
    return StateTables(places, kept, chunks, begins, walks=walks, levels=levels, **counts)


def _opens(bounds: Int32Array, alike: np.ndarray, share: bool) -> np.ndarray:
    """Return the segments with which walks begin: others follow one that they are like, unless it
    goes on, in the same chunk."""
    if not share:
        return np.arange(len(alike))
    new = alike[1:, -1] | (alike[1:] != alike[:-1]).any(axis=1)
    opens = []
    ends = bounds[1:].tolist()
    for begin, end in pairwise((0, *(np.flatnonzero(new) + 1).tolist(), len(alike))):
        segment = begin
        while segment < end:
            opens.append(segment)
            segment = bisect_right(ends, int(bounds[segment]) + CHUNK_SIZE, segment, end)
            segment = max(segment, opens[-1] + 1)  # one that goes on
    return np.array(opens)


def _check(batch: PackedBatch) -> None:
    """Raise ValueError where a walk would not find the state that it begins with."""
    lost = np.flatnonzero((batch.prefix_lens > 0) & (batch.prefix_states < 0))
    if len(lost):
        raise ValueError(f"the prefix of {batch.prefix_lens[lost[0]]} tokens has no state after it")
    states = np.where(batch.prefix_lens > 0, batch.prefix_states, -1)[batch.request_of]
    segments = np.searchsorted(batch.cu_seqlens, batch.state_rows, side="right") - 1
    readers = states[batch.parent < 0]
    for slot, own in zip(batch.state_slots.tolist(), states[segments].tolist(), strict=True):
        count = np.count_nonzero(readers == slot)
        if count > 1 or (count and slot != own):
            raise ValueError(f"the state in slot {slot} is overwritten while others begin with it")


def _starts(walked: np.ndarray, kept: Int32Array) -> np.ndarray:
    """Return the first row of each chunk, and the number of all rows."""
    pieces = np.unique(np.concatenate((walked, kept + 1))).astype(np.int64)
    counts = -(-np.diff(pieces) // CHUNK_SIZE)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.append(np.repeat(pieces[:-1], counts) + CHUNK_SIZE * within, pieces[-1])
