"""Batches that touch what traffic will: every layout of attention, full and with a single row."""

from collections.abc import Iterator

import numpy as np

from gpuscore.types import PackedBatch


def warmup_batches(num_tokens: int, page_size: int) -> Iterator[PackedBatch]:
    """Batches of token 0.

    A query that fills a page, then items on those pages, a query with items beside it, a lone row.
    """
    yield _batch([num_tokens], [-1], kept=min(page_size, num_tokens))
    item = max(1, num_tokens // 4)
    if num_tokens >= 4:
        yield _batch([item, item, item], [-1, -1, -1], cached=page_size)
        yield _batch([item, item, item], [-1, 0, 0])
    yield _batch([1], [-1])


def _batch(
    lengths: list[int], parents: list[int], *, kept: int = 0, cached: int = 0
) -> PackedBatch:
    """Segments of one request on page 0, the last two of them scored.

    Args:
        lengths: tokens of each segment.
        parents: the segment that each continues, or -1.
        kept: how many tokens of the first segment are written to page 0.
        cached: how many tokens of page 0 are the request's prefix.
    """
    int32 = np.int32
    ends = np.cumsum(lengths)
    starts = np.array([cached if p < 0 else cached + lengths[p] for p in parents])
    scored = ends[-2:] - 1
    slots = np.full(ends[-1], -1, int32)
    slots[:kept] = np.arange(kept)
    return PackedBatch(
        token_ids=np.zeros(ends[-1], int32),
        positions=np.concatenate(
            [start + np.arange(n) for start, n in zip(starts, lengths, strict=True)]
        ).astype(int32),
        cu_seqlens=np.concatenate([[0], ends]).astype(int32),
        parent=np.array(parents, int32),
        request_of=np.zeros(len(lengths), int32),
        prefix_lens=np.array([cached], int32),
        page_table=np.zeros((1, 1), int32),
        slot_mapping=slots,
        score_rows=scored.astype(int32),
        cu_labels=np.arange(len(scored) + 1, dtype=int32),
        label_token_ids=np.zeros(len(scored), int32),
        need_lse=np.ones(len(scored), bool),
        need_top=False,
    )
