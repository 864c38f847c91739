"""Tables of one batch for linear layers, made once and shared by all of them.

A segment is divided into chunks of consecutive rows; a chunk also ends at each row whose state is
kept. The walk over a segment's chunks begins with the last state of the parent segment, with a kept
state, or with zeros. The depth of the segment in its tree is the level of its walk.

Leaf segments of one depth that begin with the same state share chunks, and so one walk, because a
chunk of few rows costs as much as one of many. The C functions do not support shared chunks.
"""

from bisect import bisect_right
from itertools import pairwise

import numpy as np

from gpuscore.backends.torch.words import ArraySpec
from gpuscore.types.batch import Int32Array, PackedBatch
from gpuscore_kernels.delta_net import CHUNK_SIZE

# The most states that a batch in a CUDA graph holds for later levels, and that it keeps in slots.
HELD = 16
KEPT = 32


def table_specs(tokens: int, scored: int, kernel: int) -> list[ArraySpec]:
    """Return the largest shapes of the arrays of `lay_out_states` in a CUDA graph.

    They are enough for batches with `tokens` tokens and `scored` scored rows that keep few states
    and have few queries with items. Chunks, walks and tails of the padding do nothing.
    """
    chunks = min(tokens, tokens // CHUNK_SIZE + 2 * scored + KEPT)
    going_on = min(scored, tokens // CHUNK_SIZE + HELD + KEPT)
    return [
        ArraySpec((tokens, kernel - 1), -1),
        ArraySpec((KEPT + 1, kernel), -1),
        ArraySpec((chunks + 1, 4)),
        ArraySpec((tokens,)),
        ArraySpec((HELD, 0)),
        *(ArraySpec((walks, 3)) for walks in (going_on, scored) * 2),
    ]


def lay_out_states(batch: PackedBatch, kernel: int, merge_siblings: bool) -> list[Int32Array]:
    """Lay out `batch` for convolutions of `kernel` tokens; `merge_siblings`: they share chunks.

    Returns:
        The places [T, kernel - 1] of the rows that each row's convolution sees before itself.
        `gpuscore_kernels.delta_net.reference` says what places are.
        The argument of `keep_tails`. Tails that need rows of another slot come first, because
        later tails may overwrite that slot.
        `Walks.chunks` and `Walks.begins`.
        [n, 0] for n states that are held: no words.
        `Walks.walks`: two arrays for each depth, first the walks that go on, then the others.

    Raises:
        ValueError: the state after a cached prefix is missing, or overwritten while it is needed.
    """
    _check(batch)
    bounds = batch.cu_seqlens
    parent = batch.parent
    rows = np.arange(batch.num_tokens)
    root = np.where(batch.prefix_lens > 0, batch.prefix_states, -1)[batch.request_of]
    tail = np.where(root >= 0, -1 - (root + 1) * (kernel - 1), -1)  # its last row
    before = rows - 1
    before[bounds[:-1]] = np.where(parent >= 0, bounds[parent + 1] - 1, tail)
    seen = [rows]
    for _ in range(kernel - 1):
        last = seen[0]
        behind = np.where(last < -1, last + 1, -1)
        seen.insert(0, np.where(last >= 0, before[np.maximum(last, 0)], behind))
    places = np.stack(seen, axis=1)
    kept = np.column_stack((batch.state_slots, places[batch.state_rows, 1:]))
    theirs = kept[:, 1:] < -1
    foreign = theirs & ((-2 - kept[:, 1:]) // (kernel - 1) != kept[:, :1])
    kept = kept[np.argsort(~foreign.any(axis=1), kind="stable")]

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
    opens = _opens(bounds, alike, merge_siblings)  # the segments with which walks begin

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
        np.concatenate((kept, np.full((1, kernel), -1))),
        chunks,
        begins,
        np.empty((len(inner), 0)),
        *(walks[level == number] for number in range(level.max(initial=-1) + 1)),
    )
    return [np.ascontiguousarray(array, dtype=np.int32) for array in arrays]


def _opens(bounds: Int32Array, alike: np.ndarray, merge_siblings: bool) -> np.ndarray:
    """Return the segments with which walks begin. Each other segment shares the chunk of the
    segment before it: both have equal rows of `alike`, and neither goes on."""
    if not merge_siblings:
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
    """Raise ValueError if the state that a walk begins with is missing or overwritten."""
    lost = np.flatnonzero((batch.prefix_lens > 0) & (batch.prefix_states < 0))
    if len(lost):
        raise ValueError(f"the prefix of {batch.prefix_lens[lost[0]]} tokens has no state after it")
    states = np.where(batch.prefix_lens > 0, batch.prefix_states, -1)[batch.request_of]
    segments = np.searchsorted(batch.cu_seqlens, batch.state_rows, side="right") - 1
    readers = states[batch.parent < 0]
    for slot, read_slot in zip(batch.state_slots.tolist(), states[segments].tolist(), strict=True):
        count = np.count_nonzero(readers == slot)
        if count > 1 or (count and slot != read_slot):
            raise ValueError(f"the state in slot {slot} is overwritten while others begin with it")


def _starts(walked: np.ndarray, kept: Int32Array) -> np.ndarray:
    """Return the first row of each chunk, and the number of all rows."""
    pieces = np.unique(np.concatenate((walked, kept + 1))).astype(np.int64)
    counts = -(-np.diff(pieces) // CHUNK_SIZE)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.append(np.repeat(pieces[:-1], counts) + CHUNK_SIZE * within, pieces[-1])
