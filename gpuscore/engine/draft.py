"""Shares of jobs as one `PackedBatch`: which segments, over which cached prefixes."""

from collections.abc import Sequence

import numpy as np

from gpuscore.engine.jobs import Job, Share
from gpuscore.engine.planner import Prefix, Segment, pack, page_slots
from gpuscore.types import Int32Array, PackedBatch


def draft_batch(shares: Sequence[Share], page_size: int) -> PackedBatch:
    """The batch that computes these shares, in this order."""
    segments: list[Segment] = []
    prefixes: list[Prefix] = []
    for share in shares:
        _add_share(share, page_size, segments, prefixes)
    need_top = any(share.job.request.need_top for share in shares)
    return pack(segments, prefixes, need_top=need_top)


def _add_share(
    share: Share, page_size: int, segments: list[Segment], prefixes: list[Prefix]
) -> None:
    job, request, (start, stop) = share.job, share.job.request, share.query
    pages = _pages(job.query_pages)
    row, parent = len(prefixes), -1
    if share.items or stop > start:
        prefixes.append(Prefix(start, pages))
    if stop > start:
        parent = len(segments)
        slots = page_slots(pages, start, stop, page_size)
        segments.append(Segment(request.query_ids[start:stop], start, row, slots=slots))
    for item in share.items:
        segments.append(
            Segment(
                request.item_ids[item],
                job.cut,
                row,
                parent=parent,
                label_ids=request.label_ids[item],
                need_lse=request.need_lse,
            )
        )
    if share.long is not None:
        _add_long_chunk(share, page_size, segments, prefixes)


def _add_long_chunk(
    share: Share, page_size: int, segments: list[Segment], prefixes: list[Prefix]
) -> None:
    """A chunk of an item that is longer than a batch.

    Its sequence shares the query's full pages and recomputes the rest of the query, because two
    sequences cannot continue the same half-filled page.
    """
    assert share.long is not None  # noqa: S101  (the caller saw to it)
    job, request, (item, start, stop) = share.job, share.job.request, share.long
    base = job.cut // page_size * page_size
    pages = np.concatenate((_pages(job.query_pages)[: base // page_size], _pages(job.item_pages)))
    tokens = np.concatenate((request.query_ids[base:], request.item_ids[item]))
    prefixes.append(Prefix(base + start, pages))
    segments.append(
        Segment(
            tokens[start:stop],
            base + start,
            len(prefixes) - 1,
            slots=None
            if share.long_ends
            else page_slots(pages, base + start, base + stop, page_size),
            label_ids=request.label_ids[item] if share.long_ends else None,
            need_lse=request.need_lse and share.long_ends,
        )
    )


def long_length(job: Job, item: int, page_size: int) -> int:
    """Tokens to compute for a long item: what follows the query's last full page."""
    return job.cut % page_size + len(job.request.item_ids[item])


def _pages(pages: Int32Array | None) -> Int32Array:
    assert pages is not None  # noqa: S101  (a job has its pages before any share of it exists)
    return pages
