"""Batches made up at start: for lazy set-up before traffic, and for the memory of the largest."""

from collections.abc import Iterator, Sequence

import numpy as np

from gpuscore.arrays import Int32Array
from gpuscore.batch import PackedBatch, Prefix, Segment, pack

SMALL = 64  # tokens of a batch that only sets things up
LABELS = 16384  # of a largest batch, more than the label head looks at in one tile


def warmup_batches(max_tokens: int, page_size: int) -> Iterator[PackedBatch]:
    """Small batches of token 0, in every layout.

    A query that fills a page, then items on those pages, a query with items beside it, a lone row,
    and one of which less is asked: kernels of the label head are compiled for either.
    """
    size = min(max_tokens, SMALL)
    yield _batch([size], kept=min(page_size, size), scored=1, page_size=page_size)
    if size >= 4:
        items = [size // 4] * 3
        yield _batch(items, cached=page_size, scored=2, page_size=page_size)
        yield _batch(items, parents=[-1, 0, 0], scored=2, page_size=page_size)
    for need_top in (True, False):
        yield _batch([1], scored=1, page_size=page_size, need_top=need_top)


def largest_batches(max_tokens: int, max_model_len: int, page_size: int) -> Iterator[PackedBatch]:
    """The full batches that take the most memory, with all that can be asked of a row.

    Items of one token behind the longest prefix: attention fills each of them up to four rows,
    every row is scored, and the keys of the prefix are gathered. And the end of the longest prompt,
    in one segment that is kept, with every row of it scored: its rows reach back differently far in
    layers with a window. No other layout came near these.

    Prefixes are the first page over and over, so a pool of that page is enough.
    """
    labels = -(-LABELS // max_tokens)
    items, end = [1] * max_tokens, min(max_tokens, max_model_len)
    prefix, before = max_model_len - 1, max_model_len - end
    yield _batch(items, cached=prefix, scored=max_tokens, labels=labels, page_size=page_size)
    yield _batch([end], cached=before, kept=end, scored=1, every_row=True, page_size=page_size)


def _batch(
    lengths: Sequence[int],
    *,
    page_size: int,
    scored: int,
    parents: Sequence[int] | None = None,
    cached: int = 0,
    kept: int = 0,
    labels: int = 1,
    every_row: bool = False,
    need_top: bool = True,
) -> PackedBatch:
    """Segments of one request on page 0, with log-sum-exp.

    Args:
        lengths: tokens of each segment.
        scored: how many segments, the last ones, are scored.
        parents: the segment that each continues, or -1; None = all -1.
        cached: length of the request's prefix.
        kept: how many tokens of the first segment are written, to slots of page 0 in turn.
        labels: of each scored row.
        every_row: each row of the scored segments is scored, for one label.
        need_top: also ask for the most probable tokens.
    """
    segments = []
    for index, length in enumerate(lengths):
        parent = -1 if parents is None else parents[index]
        is_scored = index >= len(lengths) - scored
        segments.append(
            Segment(
                _zeros(length),
                start=cached + (lengths[parent] if parent >= 0 else 0),
                prefix=0,
                parent=parent,
                slots=_slots(length, kept, page_size) if kept and index == 0 else None,
                label_ids=_zeros(length if every_row else labels) if is_scored else None,
                need_lse=True,
                every_row=every_row,
            )
        )
    prefix = Prefix(cached, _zeros(-(-cached // page_size)))
    return pack(segments, [prefix], need_top=need_top)


def _zeros(count: int) -> Int32Array:
    return np.zeros(count, np.int32)


def _slots(length: int, kept: int, page_size: int) -> Int32Array:
    slots = np.full(length, -1, np.int32)
    slots[:kept] = np.arange(kept) % page_size
    return slots
