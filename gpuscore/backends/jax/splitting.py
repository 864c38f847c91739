"""Divides a batch whose prefixes have more pages than a program's lists hold."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gpuscore.types.arrays import Int32Array
from gpuscore.types.batch import PackedBatch


def split(batch: PackedBatch, entries: Int32Array, room: int) -> Iterator[PackedBatch]:
    """Yield batches that hold whole trees, in order; together they are the batch.

    Rows of one tree see no rows of another, so every row keeps what it sees.

    Args:
        batch: to divide.
        entries: [R] entries of each request's page list; at most `room` each.
        room: entries of all requests of a batch that is yielded.
    """
    if entries[np.unique(batch.request_of)].sum() <= room:
        yield batch
        return
    first, held = 0, set[int]()
    for root in np.flatnonzero(batch.parent < 0).tolist():
        request = int(batch.request_of[root])
        if sum(int(entries[other]) for other in held | {request}) > room:
            yield segments_of(batch, first, root)
            first, held = root, set()
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
