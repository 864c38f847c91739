"""Artificial batches at start: small ones to warm up, large ones to measure peak memory."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from gpuscore.types.batch import Int32Array, PackedBatch, Prefix, Rows, Segment, pack
from gpuscore.types.request import MAX_TOP

SMALL = 64  # tokens of a warm-up batch
FEW_ROWS = 256  # rows; attention holds scores of no more at a time
SOME_KEYS = 1024  # keys, behind which a full batch takes more memory for its rows than for them
LABELS = 16384  # labels of a largest batch; more than the label head handles in one tile


def warmup_batches(
    max_tokens: int, page_size: int, rows: Sequence[int] = (1,)
) -> Iterator[PackedBatch]:
    """Yield small batches of token 0, one for every layout.

    The layouts are: a query that fills a page; items on that page; a query with items in the same
    batch; and each number of scored rows in `rows` with several most probable tokens, with one
    and with none, since the label head has a kernel for each.
    """
    size = min(max_tokens, SMALL)
    yield _batch([size], _Results(1), page_size, kept=min(page_size, size))
    if size >= 4:
        items = [size // 4] * 3
        yield _batch(items, _Results(2), page_size, cached=page_size)
        yield _batch(items, _Results(2), page_size, parents=[-1, 0, 0])
    for num_top, count in product((MAX_TOP, 1, 0), rows):
        items = [1] * min(count, max_tokens)
        yield _batch(items, _Results(len(items), num_top=num_top), page_size)


def largest_batches(max_tokens: int, max_model_len: int, page_size: int) -> Iterator[PackedBatch]:
    """Return the full batches that take the most memory, with every optional result asked for.

    The first has items of one token behind the longest prefix, with every row scored. The second is
    the end of the longest prompt in one segment that is kept, with every row scored.

    Prefixes repeat the first page, so a pool of that one page is enough.
    """
    end = min(max_tokens, max_model_len)
    prefix = max_model_len - 1
    before = max_model_len - end
    return _full_batches(max_tokens, prefix, (before, end), page_size)


def _full_batches(
    max_tokens: int, prefix: int, prompt: tuple[int, int], page_size: int
) -> Iterator[PackedBatch]:
    """Yield items behind `prefix` cached tokens, and tokens of a prompt behind cached ones."""
    before, end = prompt
    items = [1] * max_tokens
    results = _Results(max_tokens, labels=-(-LABELS // max_tokens))
    yield _batch(items, results, page_size, cached=prefix)
    yield _batch([end], _Results(1, every_row=True), page_size, cached=before, kept=end)


def largest_in_parts(
    max_tokens: int, max_model_len: int, page_size: int
) -> list[Iterator[PackedBatch]]:
    """Return batches whose peaks together are at least the peak of `largest_batches`.

    Full batches behind few keys, then few rows behind the longest prefix. What a pass holds depends
    on the number of rows or on the number of keys, or has a constant bound; only the operations of
    attention grow with the product of both, which for a prompt of 40,960 tokens makes
    `largest_batches` take a CPU half a minute.
    """
    some = max_tokens + SOME_KEYS
    if max_tokens <= FEW_ROWS or max_model_len <= some:
        return [largest_batches(max_tokens, max_model_len, page_size)]
    full = _full_batches(max_tokens, SOME_KEYS, (SOME_KEYS, max_tokens), page_size)
    cached = max_model_len - 1
    items = _batch([1] * FEW_ROWS, _Results(FEW_ROWS), page_size, cached=cached)
    return [full, iter([items])]


class _Results(NamedTuple):
    """The results that a batch is asked for, besides the log-sum-exp.

    Attributes:
        scored: how many segments are scored, counted from the last.
        labels: how many labels each scored row has.
        every_row: each row of the scored segments is scored, for one label.
        num_top: most probable tokens.
    """

    scored: int
    labels: int = 1
    every_row: bool = False
    num_top: int = MAX_TOP


def _batch(
    lengths: Sequence[int],
    results: _Results,
    page_size: int,
    *,
    parents: Sequence[int] | None = None,
    cached: int = 0,
    kept: int = 0,
) -> PackedBatch:
    """Build a batch of one request on page 0 and state 0.

    Args:
        lengths: tokens of each segment.
        page_size: tokens of a page.
        parents: the parent of each segment, or -1; None = all -1.
        cached: length of the cached prefix.
        kept: how many tokens of the first segment are kept; slots of page 0 are used in turn.
    """
    segments = []
    for index, length in enumerate(lengths):
        parent = -1 if parents is None else parents[index]
        is_scored = index >= len(lengths) - results.scored
        num_labels = length if results.every_row else results.labels
        segments.append(
            Segment(
                _zeros(length),
                start=cached + (lengths[parent] if parent >= 0 else 0),
                prefix=0,
                parent=parent,
                slots=_slots(length, kept, page_size) if kept and index == 0 else None,
                label_ids=_zeros(num_labels if is_scored else 0),
                rows=Rows.every(length) if results.every_row else None,
                need_lse=True,
                states=((length, 0),) if kept and index == 0 else (),
            )
        )
    prefix = Prefix(cached, _zeros(-(-cached // page_size)), 0 if cached else -1)
    return pack(segments, [prefix], num_top=results.num_top)


def _zeros(count: int) -> Int32Array:
    return np.zeros(count, np.int32)


def _slots(length: int, kept: int, page_size: int) -> Int32Array:
    slots = np.full(length, -1, np.int32)
    slots[:kept] = np.arange(kept) % page_size
    return slots
