"""Index tensors of one batch for linear layers, made once and shared by all of them.

Segments are divided into chunks of consecutive rows, also after each row whose state is kept.
Chunks form trees as segments do: each begins with the end state of the chunk before it, or of its
segment's parent, or with a kept state, or with zeros. Levels of a tree run one after the other;
within a level, chunks of similar length run together, and siblings read one state.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.torch.kv_pool import index_of
from gpuscore.types.batch import Int64Array, PackedBatch

CHUNK = 64  # rows of a chunk, at most, as in transformers
SIMILAR = 8  # chunks are padded to a multiple of so many rows


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """Chunks of similar length of one level, computed in one call.

    Args:
        rows: [n, length] rows of the batch; T, a row of zeros, pads short chunks.
        sources: [n], or [1] for siblings: places among the end states of the level before, or, in
            the first level, among the kept states that are read; None = zeros.
        ends: how many chunks, the first ones, have an end state that is needed.
        kept: [k] places among these end states, and the slots that they go into.
    """

    rows: Tensor
    sources: Tensor | None
    ends: int
    kept: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class DeltaLayout:
    """Index tensors of one batch.

    A place below T is a row of the batch; then follow the kept rows before each prefix that has a
    state, `kernel` - 1 of each; then a row of zeros.

    Args:
        levels: groups of chunks.
        read: [X] slots of the states after prefixes.
        written: [K] slots of the states that are kept.
        places: [T, kernel] of the rows that each row's convolution sees; the last is its own.
        tails: [K, kernel - 1] of the last rows up to each kept state.
    """

    levels: tuple[tuple[ChunkGroup, ...], ...]
    read: Tensor
    written: Tensor
    places: Tensor
    tails: Tensor


def lay_out_states(batch: PackedBatch, kernel: int, device: torch.device) -> DeltaLayout:
    """Lay out `batch` for linear layers whose convolution sees `kernel` tokens.

    Raises:
        ValueError: the state after a cached prefix is missing.
    """
    lost = np.flatnonzero((batch.prefix_lens > 0) & (batch.prefix_states < 0))
    if len(lost):
        raise ValueError(f"the prefix of {batch.prefix_lens[lost[0]]} tokens has no state after it")
    has_state = batch.prefix_lens > 0
    read = batch.prefix_states[has_state].astype(np.int64)
    place = np.where(has_state, np.cumsum(has_state) - 1, -1)  # of a request's state among `read`
    chunks = _chunks(batch, place)
    seen = _seen(batch, place, kernel)
    return DeltaLayout(
        levels=tuple(_levels(chunks, batch.num_tokens, device)),
        read=index_of(read, device),
        written=index_of(batch.state_slots, device),
        places=index_of(seen, device),
        tails=index_of(seen[batch.state_rows, 1:], device),
    )


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The chunks of a batch, by their rows.

    Args:
        starts, lengths: [C] their rows.
        parents: [C] the chunk that each continues, -1 = none.
        kept_places: [C] of a first chunk's kept state among those read, -1 = none.
        slots: of each chunk whose end state is kept.
    """

    starts: Int64Array
    lengths: Int64Array
    parents: list[int]
    kept_places: list[int]
    slots: dict[int, list[int]]


def _chunks(batch: PackedBatch, place: np.ndarray) -> _Chunks:
    bounds = batch.cu_seqlens.astype(np.int64)
    pieces = np.unique(np.concatenate((bounds, batch.state_rows.astype(np.int64) + 1)))
    sizes = np.diff(pieces)
    counts = -(-sizes // CHUNK)
    piece = np.repeat(np.arange(len(sizes)), counts)
    within = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = pieces[:-1][piece] + CHUNK * within
    lengths = np.minimum(CHUNK, pieces[1:][piece] - starts)
    segment = np.searchsorted(bounds, starts, side="right") - 1
    first = starts == bounds[segment]
    last = np.searchsorted(starts, bounds[1:]) - 1  # last chunk of each segment
    above = batch.parent[segment]
    inherited = np.where(above >= 0, last[above], -1)
    parents = np.where(first, inherited, np.arange(len(starts)) - 1)
    kept = np.where(first & (above < 0), place[batch.request_of[segment]], -1)
    slots: dict[int, list[int]] = defaultdict(list)
    ending = np.searchsorted(starts, batch.state_rows, side="right") - 1
    for chunk, slot in zip(ending.tolist(), batch.state_slots.tolist(), strict=True):
        slots[chunk].append(slot)
    return _Chunks(starts, lengths, parents.tolist(), kept.tolist(), slots)


def _levels(
    chunks: _Chunks, num_rows: int, device: torch.device
) -> Iterator[tuple[ChunkGroup, ...]]:
    """Yield the groups of each level, the first level first."""
    depth: list[int] = []
    for parent in chunks.parents:  # a parent comes before its children
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
    levels: dict[int, list[int]] = defaultdict(list)
    for chunk, level in enumerate(depth):
        levels[level].append(chunk)
    inner = {parent for parent in chunks.parents if parent >= 0} | set(chunks.slots)
    places: dict[int, int] = {}  # of the end states of the level before
    for level in range(len(levels)):
        sources = {
            chunk: places[chunks.parents[chunk]] if level else chunks.kept_places[chunk]
            for chunk in levels[level]
        }
        groups, places = [], {}
        for members in _alike(chunks, levels[level], sources):
            ends = [chunk for chunk in members if chunk in inner]
            places |= {chunk: len(places) + place for place, chunk in enumerate(ends)}
            members = ends + [chunk for chunk in members if chunk not in inner]
            of_group = [sources[chunk] for chunk in members]
            groups.append(_group(chunks, members, of_group, ends, num_rows, device))
        yield tuple(groups)


def _alike(chunks: _Chunks, level: Sequence[int], sources: dict[int, int]) -> Iterator[list[int]]:
    """Yield chunks of similar length: siblings, those alone with their state, those without one."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for chunk in level:
        padded = -(-int(chunks.lengths[chunk]) // SIMILAR) * SIMILAR
        groups[padded, sources[chunk]].append(chunk)
    alone: dict[int, list[int]] = defaultdict(list)
    for (padded, source), members in groups.items():
        if source >= 0 and len(members) == 1:
            alone[padded] += members
        else:
            yield members
    yield from alone.values()


def _group(
    chunks: _Chunks,
    members: list[int],
    sources: list[int],
    ends: list[int],
    num_rows: int,
    device: torch.device,
) -> ChunkGroup:
    starts, lengths = chunks.starts[members, None], chunks.lengths[members, None]
    offsets = np.arange(lengths.max())
    rows = np.where(offsets < lengths, starts + offsets, num_rows)
    siblings = len(set(sources)) == 1
    kept = [(end, slot) for end, chunk in enumerate(ends) for slot in chunks.slots.get(chunk, ())]

    def index(values: Sequence[int]) -> Tensor:
        return index_of(np.array(values, np.int64), device)

    return ChunkGroup(
        rows=index_of(rows, device),
        sources=None if sources[0] < 0 else index(sources[:1] if siblings else sources),
        ends=len(ends),
        kept=(index([end for end, _ in kept]), index([slot for _, slot in kept])),
    )


def _seen(batch: PackedBatch, place: np.ndarray, kernel: int) -> Int64Array:
    """Return the places [T, kernel] that the convolution of each row sees."""
    before = _before(batch, place, kernel - 1)
    lengths = np.diff(batch.cu_seqlens)
    segments, rows = np.repeat(np.arange(len(lengths)), lengths), np.arange(batch.num_tokens)
    ago = np.arange(kernel - 1, -1, -1)  # of each tap
    # Over 0: so many rows before the segment's start.
    outside = ago - (rows - batch.cu_seqlens[segments])[:, None]
    behind = before[segments[:, None], np.maximum(outside, 1) - 1]
    return np.where(outside > 0, behind, rows[:, None] - ago)


def _before(batch: PackedBatch, place: np.ndarray, count: int) -> Int64Array:
    """Return the places [S, count] of the rows before each segment, the nearest first."""
    read = int(place.max(initial=-1)) + 1
    zeros = batch.num_tokens + read * count
    ago = np.arange(1, count + 1)
    states = place[batch.request_of][:, None]
    before = np.where(states >= 0, batch.num_tokens + (states + 1) * count - ago, zeros)
    bounds = batch.cu_seqlens.tolist()
    for segment, parent in enumerate(batch.parent.tolist()):
        if parent >= 0:  # it comes before its children
            length = bounds[parent + 1] - bounds[parent]
            own = np.arange(1, min(length, count) + 1)
            before[segment, : len(own)] = bounds[parent + 1] - own
            before[segment, len(own) :] = before[parent, : count - len(own)]
    return before
