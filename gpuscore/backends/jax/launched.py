"""Batches that a `JaxBackend` has divided and launched, and their results."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax import Array

from gpuscore.backends.jax.label_head import MANY, NOTHING, ONE
from gpuscore.backends.jax.programs import ScoredRows
from gpuscore.types.batch import Int32Array, PackedBatch, RowScores


@dataclass(frozen=True, slots=True)
class LaunchedPart:
    """A batch that was launched, with arrays that are filled once it has run."""

    batch: PackedBatch
    statistics: int  # NOTHING, ONE or MANY of `label_head`
    rows: ScoredRows
    labels: tuple[Array, ...]  # label logits; together [>= L]

    def read(self) -> Iterator[Array]:
        """Yield the arrays that `scores` will read."""
        yield from self.labels
        if self.statistics != NOTHING:
            yield self.rows.lse
        if self.batch.num_top:
            yield from (self.rows.top, self.rows.top_logits)

    def scores(self) -> RowScores:
        """Wait for the device and return the results."""
        batch = self.batch
        rows = self.rows
        count = len(batch.score_rows)
        empty = np.empty(0, np.float32)
        logits = np.concatenate([empty, *map(np.asarray, self.labels)])
        logits = logits[: len(batch.label_token_ids)]
        jax.block_until_ready(rows)
        if self.statistics == NOTHING:
            return RowScores(logits, lse=None, top_ids=None, top_logits=None)
        needed = batch.need_lse | (batch.num_top > 0)
        lse = np.where(needed, np.asarray(rows.lse)[:count], np.float32(np.nan))
        if not batch.num_top:
            return RowScores(logits, lse, top_ids=None, top_logits=None)
        tops = (np.asarray(x)[:count, : batch.num_top] for x in (rows.top, rows.top_logits))
        return RowScores(logits, lse, *tops)


def joined(parts: Sequence[RowScores]) -> RowScores:
    """Join the results of a batch's parts, which have the same fields."""
    if len(parts) == 1:
        return parts[0]
    columns = ((part.lse, part.top_ids, part.top_logits) for part in parts)
    lse, ids, logits = (
        None if column[0] is None else np.concatenate(column)
        for column in zip(*columns, strict=True)
    )
    return RowScores(np.concatenate([part.label_logits for part in parts]), lse, ids, logits)


def statistics_of(batch: PackedBatch) -> int:
    """Return the statistics over the vocabulary that a batch needs."""
    if batch.num_top > 1:
        return MANY
    return ONE if batch.num_top or batch.need_lse.any() else NOTHING


def split(batch: PackedBatch, entries: Int32Array, max_entries: int) -> Iterator[PackedBatch]:
    """Yield batches whose prefixes fit a program's lists of pages; together they are the batch.

    Each holds whole trees, in their order. Rows see no rows of other trees, so every row still sees
    the same rows.

    Args:
        batch: the batch to divide.
        entries: [R] entries of each request's page list; at most `max_entries` each.
        max_entries: most entries of all requests of a yielded batch.
    """
    if entries[np.unique(batch.request_of)].sum() <= max_entries:
        yield batch
        return
    first = 0
    held = set[int]()
    for root in np.flatnonzero(batch.parent < 0).tolist():
        request = int(batch.request_of[root])
        if sum(int(entries[other]) for other in held | {request}) > max_entries:
            yield segments_of(batch, first, root)
            first = root
            held = set()
        held.add(request)
    yield segments_of(batch, first, len(batch.parent))


def segments_of(batch: PackedBatch, first: int, stop: int) -> PackedBatch:
    """Return a batch of the segments from `first` to `stop`, which must be whole trees."""
    rows = slice(int(batch.cu_seqlens[first]), int(batch.cu_seqlens[stop]))
    scored = slice(*np.searchsorted(batch.score_rows, (rows.start, rows.stop)).tolist())
    labels = slice(int(batch.cu_labels[scored.start]), int(batch.cu_labels[scored.stop]))
    parent = batch.parent[first:stop]
    return replace(
        batch,
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        cu_seqlens=batch.cu_seqlens[first : stop + 1] - np.int32(rows.start),
        parent=np.where(parent < 0, parent, parent - np.int32(first)),
        request_of=batch.request_of[first:stop],
        slot_mapping=batch.slot_mapping[rows],
        score_rows=batch.score_rows[scored] - np.int32(rows.start),
        cu_labels=batch.cu_labels[scored.start : scored.stop + 1] - np.int32(labels.start),
        label_token_ids=batch.label_token_ids[labels],
        need_lse=batch.need_lse[scored],
    )
