"""Chunks of a batch's rows for linear layers: what every backend lays out for its own loops.

Segments are divided into chunks of consecutive rows, also after each row whose state is kept.
Chunks form trees as segments do: each begins with the end state of the chunk before it, or of its
segment's parent, or with a kept state, or with zeros.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from gpuscore.types.batch import Int64Array, PackedBatch


@dataclass(frozen=True, slots=True)
class StateChunks:
    """The chunks of a batch, by their rows.

    Args:
        starts, lengths: [C] their rows.
        parents: [C] the chunk that each continues, -1 = none; it comes before its children.
        kept_places: [C] of a first chunk's kept state among those read, -1 = none.
        slots: of each chunk whose end state is kept.
    """

    starts: Int64Array
    lengths: Int64Array
    parents: list[int]
    kept_places: list[int]
    slots: dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class StateRows:
    """The chunks of a batch, and the rows that their convolutions see.

    A place below T is a row of the batch; then follow the kept rows before each prefix that has a
    state, `kernel` - 1 of each; then a row of zeros.

    Args:
        chunks: of the rows.
        read: [X] slots of the states after prefixes, each once.
        seen: [T, kernel] places of the rows that each row's convolution sees; the last is its own.
    """

    chunks: StateChunks
    read: Int64Array
    seen: Int64Array


def state_rows_of(batch: PackedBatch, kernel: int, most: int) -> StateRows:
    """Divide `batch` into chunks of at most `most` rows; the convolution sees `kernel` tokens.

    Raises:
        ValueError: the state after a cached prefix is missing.
    """
    lost = np.flatnonzero((batch.prefix_lens > 0) & (batch.prefix_states < 0))
    if len(lost):
        raise ValueError(f"the prefix of {batch.prefix_lens[lost[0]]} tokens has no state after it")
    has_state = batch.prefix_lens > 0
    place = np.full(len(has_state), -1)  # of a request's state among `read`
    read, place[has_state] = np.unique(batch.prefix_states[has_state], return_inverse=True)
    chunks, seen = _chunks(batch, place, most), _seen(batch, place, kernel)
    return StateRows(chunks, read.astype(np.int64), seen)


def _chunks(batch: PackedBatch, place: np.ndarray, most: int) -> StateChunks:
    bounds = batch.cu_seqlens.astype(np.int64)
    pieces = np.unique(np.concatenate((bounds, batch.state_rows.astype(np.int64) + 1)))
    sizes = np.diff(pieces)
    counts = -(-sizes // most)
    piece = np.repeat(np.arange(len(sizes)), counts)
    within = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = pieces[:-1][piece] + most * within
    lengths = np.minimum(most, pieces[1:][piece] - starts)
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
    return StateChunks(starts, lengths, parents.tolist(), kept.tolist(), slots)


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
