"""The order in which a program computes the chunks of linear layers.

A program computes a wave of several chunks at once, whose parents were in earlier waves, and holds
the end states that others still need. The order keeps these few, whatever the tree: chunks go depth
first, the child whose descendants need the most states last. Then one chunk after the other needs
at most log2(chunks) + 1 states (Sethi and Ullman, "The generation of optimal code for arithmetic
expressions", 1970). A wave takes further chunks while as many states as that are left.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from gpuscore.backends.common.state_chunks import StateChunks, state_rows_of
from gpuscore.backends.jax.layout import StateSizes, StateTables, fill
from gpuscore.types.batch import PackedBatch

# Chunks that are computed at once, each with the place where its end is held; -1 = it is not, and
# the chunk comes after those whose end is.
Wave: TypeAlias = list[tuple[int, int]]


def fill_states(tables: StateTables, batch: PackedBatch, sizes: StateSizes, tokens: int) -> None:
    """Fill the tables of a batch, for a bucket of `tokens`.

    Raises:
        ValueError: the state after a cached prefix is missing.
    """
    state_rows = state_rows_of(batch, sizes.kernel, sizes.rows)
    chunks, waves = state_rows.chunks, list(in_waves(state_rows.chunks, sizes.chunks, sizes.ends))
    order = [chunk for wave in waves for chunk, _ in wave]
    held = {chunk: 1 + place for wave in waves for chunk, place in wave}
    number = {chunk: place for place, chunk in enumerate(order)}
    kept = [
        [(number[chunk], slot) for chunk, _ in wave for slot in chunks.slots.get(chunk, ())]
        for wave in waves
    ]
    rest = 1 + sizes.ends
    sources = [
        held[parent] if parent >= 0 else rest + read if read >= 0 else 0
        for parent, read in ((chunks.parents[chunk], chunks.kept_places[chunk]) for chunk in order)
    ]
    before = state_rows.seen[chunks.starts[order], :-1]
    others = before >= batch.num_tokens  # they follow the rows of padding
    before = before + np.where(others, tokens + sizes.rows - batch.num_tokens, 0)
    tables.waves[0], tables.reads[0] = len(waves), len(state_rows.read)
    for table, values in (
        (tables.read_slots, state_rows.read),
        (tables.first, _bounds(map(len, waves))),
        (tables.ends, [sum(place >= 0 for _, place in wave) for wave in waves]),
        (tables.kept, _bounds(map(len, kept))),
        (tables.kept_chunks, [chunk for some in kept for chunk, _ in some]),
        (tables.kept_slots, [slot for some in kept for _, slot in some]),
        (tables.rows, chunks.starts[order]),
        (tables.lens, chunks.lengths[order]),
        (tables.sources, sources),
        (tables.targets, [held[chunk] for chunk in order]),
        (tables.before, before.reshape(-1)),
    ):
        fill(table, np.asarray(values, np.int64))


def in_waves(chunks: StateChunks, most: int, room: int) -> Iterator[Wave]:
    """Yield waves of at most `most` chunks, whose ends take at most `room` places at a time.

    An end's place is free for another once its last child was computed: a wave reads all states
    that its chunks begin with before it writes any.
    """
    below: list[list[int]] = [[] for _ in chunks.parents]
    for chunk, parent in enumerate(chunks.parents):
        if parent >= 0:
            below[parent].append(chunk)
    needs = _needs(chunks, below)
    roots = [chunk for chunk, parent in enumerate(chunks.parents) if parent < 0]
    rank = _depth_first(roots, below, needs)
    spare = max((needs[root] for root in roots), default=0)
    free, left, place = [*range(room)], [*map(len, below)], dict[int, int]()
    ready = [(rank[root], root) for root in roots]
    heapify(ready)
    while ready:
        wave: list[int] = []
        while ready and len(wave) < most:
            chunk = ready[0][1]
            if wave and needs[chunk] and len(free) <= spare:
                break
            heappop(ready)
            wave.append(chunk)
            parent = chunks.parents[chunk]
            if parent >= 0:
                left[parent] -= 1
                if not left[parent]:
                    free.append(place[parent])
            place[chunk] = free.pop() if needs[chunk] else -1
        ends = [chunk for chunk in wave if needs[chunk]]
        yield [(chunk, place[chunk]) for chunk in sorted(wave, key=lambda chunk: not needs[chunk])]
        free += [place[chunk] for chunk in ends if not below[chunk]]
        for child in (child for chunk in ends for child in below[chunk]):
            heappush(ready, (rank[child], child))


def _needs(chunks: StateChunks, below: Sequence[Sequence[int]]) -> list[int]:
    """Return the states that each chunk and its descendants need, one after the other."""
    needs = [int(chunk in chunks.slots) for chunk in range(len(below))]
    for chunk in reversed(range(len(below))):  # children come after it
        if below[chunk]:
            first, second = sorted([*(needs[child] for child in below[chunk]), 0])[-1:-3:-1]
            needs[chunk] = max(1, first, 1 + second)
    return needs


def _depth_first(
    roots: Sequence[int], below: Sequence[Sequence[int]], needs: Sequence[int]
) -> list[int]:
    """Return the rank of each chunk in depth-first order."""
    rank, stack, done = [0] * len(needs), [*reversed(roots)], 0
    while stack:
        chunk = stack.pop()
        rank[chunk], done = done, done + 1
        stack += sorted(below[chunk], key=needs.__getitem__, reverse=True)
    return rank


def _bounds(counts: Iterable[int]) -> list[int]:
    return [0, *accumulate(counts)]
