"""Turn the shares of a batch into a `PackedBatch`: its segments and their cached prefixes."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gpuscore.engine.jobs import Share
from gpuscore.types.arrays import NO_TOKENS, Int32Array
from gpuscore.types.batch import (
    PackedBatch,
    Prefix,
    Segment,
    SegmentColumns,
    pack_columns,
    page_slots,
)
from gpuscore.types.limits import BackendLimits


def draft_batch(shares: Sequence[Share], limits: BackendLimits) -> PackedBatch:
    """Return the batch that computes these shares, in this order."""
    segments = SegmentColumns()
    prefixes: list[Prefix] = []
    for share in shares:
        _add_share(share, limits, segments, prefixes)
    num_top = max(share.job.request.num_top for share in shares)
    return pack_columns(segments, prefixes, num_top=num_top)


def _add_share(
    share: Share, limits: BackendLimits, segments: SegmentColumns, prefixes: list[Prefix]
) -> None:
    job, request, (start, stop) = share.job, share.job.request, share.query
    pages = _pages(job.query_pages)
    row, parent = len(prefixes), -1
    if share.items or stop > start:
        prefixes.append(Prefix(start, pages))
    if stop > start:
        slots = page_slots(pages, start, stop, limits.page_size)
        segment = Segment(request.query_ids[start:stop], start, row, slots=slots)
        if request.query_labels is not None:
            labels = request.query_labels[start:stop]
            segment = replace(segment, label_ids=labels, need_lse=request.need_lse, every_row=True)
        parent = segments.add(segment)
    if request.parents is not None:
        _add_families(share, request.parents, row, parent, segments)
    else:
        lse, every = request.need_lse, request.every_position
        segments.add_like(
            Segment(NO_TOKENS, job.cut, row, parent, need_lse=lse, every_row=every),
            [request.item_ids[item] for item in share.items],
            [request.label_ids[item] for item in share.items],
        )
    if share.long is not None:
        _add_long_chunk(share, limits, segments, prefixes)


def _add_families(
    share: Share, parents: Int32Array, row: int, query: int, segments: SegmentColumns
) -> None:
    """Add the share's items, each below its parent or the query's segment."""
    request, place = share.job.request, dict[int, int]()
    every = request.every_position
    for item, above in zip(share.items, parents[share.items].tolist(), strict=True):
        start, parent = share.job.cut, query
        if above >= 0:
            parent = place[above]
            start = segments.start[parent] + len(segments.token_ids[parent])
        labels = request.label_ids[item] if len(request.label_ids[item]) else None
        lse = request.need_lse and labels is not None
        segment = Segment(request.item_ids[item], start, row, parent, None, labels, lse, every)
        place[item] = segments.add(segment)


def _add_long_chunk(
    share: Share, limits: BackendLimits, segments: SegmentColumns, prefixes: list[Prefix]
) -> None:
    """Add a chunk of an item that is longer than a batch.

    The item's sequence shares the query's pages up to `long_base` and computes the rest of the
    query again, because two sequences cannot continue the same half-filled page. The rest and the
    item are separate segments, so that the item starts a segment as a short item does.
    """
    assert share.long is not None  # noqa: S101  (the caller has checked it)
    job, request, (item, start, stop) = share.job, share.job.request, share.long
    base, page_size = long_base(job.cut, limits), limits.page_size
    rest = long_rest(job.cut, limits)
    pages = np.concatenate((_pages(job.query_pages)[: base // page_size], _pages(job.item_pages)))
    prefixes.append(Prefix(base + start, pages))

    def add(
        tokens: Int32Array, first: int, parent: int = -1, labels: Int32Array | None = None
    ) -> None:
        last = first + len(tokens)
        slots = None if share.long_ends else page_slots(pages, first, last, page_size)
        need_lse = request.need_lse and labels is not None
        row, every = len(prefixes) - 1, request.every_position
        segments.add(Segment(tokens, first, row, parent, slots, labels, need_lse, every))

    parent = -1
    if start < rest:
        parent = len(segments)
        add(request.query_ids[base + start : min(base + stop, job.cut)], base + start)
    if stop > rest:
        first, last = max(0, start - rest), stop - rest
        labels = request.label_ids[item] if share.long_ends else None
        if request.every_position:
            labels = request.label_ids[item][first:last]
        add(request.item_ids[item][first:last], job.cut + first, parent, labels)


def long_base(cut: int, limits: BackendLimits) -> int:
    """Number of query tokens whose pages a long item shares: whole pages and whole chunks."""
    whole = max(limits.page_size, limits.deterministic_chunk)
    return cut // whole * whole


def long_rest(cut: int, limits: BackendLimits) -> int:
    """Number of query tokens after `long_base`, which a long item computes again."""
    return cut - long_base(cut, limits)


def _pages(pages: Int32Array | None) -> Int32Array:
    assert pages is not None  # noqa: S101  (a job gets its pages before its first share)
    return pages
