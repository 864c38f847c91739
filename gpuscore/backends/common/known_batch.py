"""The batch with which backends compare attention with the mask rule at start."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from gpuscore.types.arrays import BoolArray
from gpuscore.types.batch import PackedBatch, Prefix, Segment, pack, page_slots, visible_rows

# Of a request: cached tokens, tokens of the query beside its items, lengths of the items.
Sizes: TypeAlias = tuple[int, int, tuple[int, ...]]
REQUESTS: tuple[Sizes, ...] = ((70, 0, (1, 9)), (0, 37, (3, 20)), (64, 6, (5,)))
CONTINUED = (3, 2)  # lengths of segments below the last item of each request, one below the other


def known_batch(page_size: int, requests: Sequence[Sizes] = REQUESTS) -> PackedBatch:
    """Build a batch of requests; every segment is scored, and the last query is kept."""
    room = max(-(-(cached + query) // page_size) for cached, query, _ in requests)
    pages = np.arange(len(requests) * room, dtype=np.int32)[::-1].reshape(len(requests), room)
    segments: list[Segment] = []
    for request, (cached, query, items) in enumerate(requests):
        parent = len(segments) if query else -1
        if query:
            slots = page_slots(pages[request], cached, cached + query, page_size)
            kept = slots if request == len(requests) - 1 else None
            segments.append(replace(_segment(query, cached, request), slots=kept))
        start = cached + query
        segments += [replace(_segment(n, start, request), parent=parent) for n in items]
        for length in CONTINUED if items else ():
            last = segments[-1]
            below = _segment(length, last.start + len(last.token_ids), request)
            segments.append(replace(below, parent=len(segments) - 1))
    prefixes = [Prefix(cached, own) for (cached, _, _), own in zip(requests, pages, strict=True)]
    return pack(segments, prefixes)


def request_mask(batch: PackedBatch, own: np.ndarray, cached: int, window: int | None) -> BoolArray:
    """Return the mask of a request's rows, [rows, cached + rows]."""
    seen = visible_rows(batch)[np.ix_(own, own)]
    mask: BoolArray = np.concatenate((np.ones((len(own), cached), dtype=bool), seen), axis=1)
    if window is not None:
        positions = np.concatenate((np.arange(cached), batch.positions[own]))
        mask &= positions > batch.positions[own, None] - window
    return mask


def _segment(length: int, start: int, request: int) -> Segment:
    ids = np.zeros(length, np.int32)
    return Segment(ids, start, request, label_ids=ids[:1])
