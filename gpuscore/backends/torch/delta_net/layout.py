"""Index tensors of one batch for linear layers, made once and shared by all of them.

Levels of the trees of chunks (`state_chunks`) run one after the other; within a level, chunks of
similar length run together, and siblings read one state.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.common.state_chunks import StateChunks, state_rows_of
from gpuscore.backends.torch.kv_pool import index_of
from gpuscore.types.batch import PackedBatch

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

    Places are those of `state_chunks.StateRows`.

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
    rows = state_rows_of(batch, kernel, CHUNK)
    return DeltaLayout(
        levels=tuple(_levels(rows.chunks, batch.num_tokens, device)),
        read=index_of(rows.read, device),
        written=index_of(batch.state_slots, device),
        places=index_of(rows.seen, device),
        tails=index_of(rows.seen[batch.state_rows, 1:], device),
    )


def _levels(
    chunks: StateChunks, num_rows: int, device: torch.device
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


def _alike(
    chunks: StateChunks, level: Sequence[int], sources: dict[int, int]
) -> Iterator[list[int]]:
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
    chunks: StateChunks,
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
