"""Batches made up at start: for lazy set-up before traffic, and for the memory of the largest."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from gpuscore.batch import PackedBatch

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
    alone = _batch([1], scored=1, page_size=page_size)
    yield alone
    yield replace(alone, need_top=False)


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
    one = _batch([end], cached=before, kept=end, scored=1, page_size=page_size)
    every = np.arange(end + 1, dtype=np.int32)
    yield replace(
        one,
        score_rows=every[:-1],
        cu_labels=every,
        label_token_ids=np.zeros(end, np.int32),
        need_lse=np.ones(end, bool),
    )


def _batch(
    lengths: Sequence[int],
    *,
    page_size: int,
    scored: int,
    parents: Sequence[int] | None = None,
    cached: int = 0,
    kept: int = 0,
    labels: int = 1,
) -> PackedBatch:
    """Segments of one request on page 0, with log-sum-exp and top token.

    Args:
        lengths: tokens of each segment.
        scored: how many segments, the last ones, are scored.
        parents: the segment that each continues, or -1; None = all -1.
        cached: length of the request's prefix.
        kept: how many tokens of the first segment are written, to slots of page 0 in turn.
        labels: of each scored row.
    """
    int32, count = np.int32, len(lengths)
    ends = np.cumsum(lengths)
    parent = np.full(count, -1, int32) if parents is None else np.array(parents, int32)
    starts = cached + np.where(parent < 0, 0, np.array(lengths)[parent])
    slots = np.full(ends[-1], -1, int32)
    slots[:kept] = np.arange(kept) % page_size
    return PackedBatch(
        token_ids=np.zeros(ends[-1], int32),
        positions=np.concatenate(
            [start + np.arange(n) for start, n in zip(starts, lengths, strict=True)]
        ).astype(int32),
        cu_seqlens=np.concatenate([[0], ends]).astype(int32),
        parent=parent,
        request_of=np.zeros(count, int32),
        prefix_lens=np.array([cached], int32),
        page_table=np.zeros((1, -(-cached // page_size)), int32),
        slot_mapping=slots,
        score_rows=(ends[count - scored :] - 1).astype(int32),
        cu_labels=(np.arange(scored + 1) * labels).astype(int32),
        label_token_ids=np.zeros(scored * labels, int32),
        need_lse=np.ones(scored, bool),
        need_top=True,
    )
