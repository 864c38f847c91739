"""Artificial batches at start: small ones to warm up, large ones to measure peak memory."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from gpuscore.types.batch import Int32Array, PackedBatch, Prefix, Rows, Segment, pack
from gpuscore.types.request import MAX_TOP

SMALL = 64  # tokens of a warm-up batch
FEW_ROWS = 256  # the most rows whose attention scores are in memory at a time
SOME_KEYS = 1024  # cached keys; they take less memory than the rows of a full batch
LABELS = 16384  # labels of a largest batch; more than the label head handles in one tile


def warmup_batches(
    max_tokens: int, page_size: int, rows: Sequence[int] = (1,)
) -> Iterator[PackedBatch]:
    """Yield small batches of token 0, one for every layout.

    The layouts are: a query that fills a page; items after that page; a query with items in the
    same batch; and each number of scored rows in `rows`. Each of the last is yielded three times:
    the label head has different kernels for several, one and no most probable tokens.
    """
    size = min(max_tokens, SMALL)
    yield _batch([size], page_size, kept=min(page_size, size))
    if size >= 4:
        items = [size // 4] * 3
        yield _batch(items, page_size, scored=2, cached=page_size)
        yield _batch(items, page_size, scored=2, parents=[-1, 0, 0])
    for num_top, count in product((MAX_TOP, 1, 0), rows):
        items = [1] * min(count, max_tokens)
        yield _batch(items, page_size, scored=len(items), num_top=num_top)


def largest_batches(max_tokens: int, max_model_len: int, page_size: int) -> Iterator[PackedBatch]:
    """Return the two full batches that take the most memory, with all optional results.

    The first has items of one token after the longest prefix, with every row scored. The second is
    the end of the longest prompt as one segment, whose keys are stored, with every row scored.
    All pages are page 0, so a pool of one page is enough.
    """
    prompt_end = min(max_tokens, max_model_len)
    cached = max_model_len - prompt_end
    return _full_batches(max_tokens, max_model_len - 1, (cached, prompt_end), page_size)


def _full_batches(
    max_tokens: int, prefix: int, prompt: tuple[int, int], page_size: int
) -> Iterator[PackedBatch]:
    """Yield a batch of items after `prefix` cached tokens, and one with the end of a prompt.

    `prompt` is the number of its cached tokens, and of the tokens after them.
    """
    cached, prompt_end = prompt
    items = [1] * max_tokens
    labels = -(-LABELS // max_tokens)
    yield _batch(items, page_size, scored=max_tokens, labels=labels, cached=prefix)
    yield _batch([prompt_end], page_size, every_row=True, cached=cached, kept=prompt_end)


def largest_in_parts(
    max_tokens: int, max_model_len: int, page_size: int
) -> list[Iterator[PackedBatch]]:
    """Return parts whose peaks add up to at least that of `largest_batches`, but run faster.

    The first part has full batches after few cached keys, the second has few rows after the longest
    prefix. This is enough, because memory grows with the number of rows or with the number of keys,
    never with their product. The time of attention does grow with the product: with a prompt of
    40,960 tokens, `largest_batches` take a CPU half a minute.
    """
    if max_tokens <= FEW_ROWS or max_model_len <= max_tokens + SOME_KEYS:
        return [largest_batches(max_tokens, max_model_len, page_size)]
    full = _full_batches(max_tokens, SOME_KEYS, (SOME_KEYS, max_tokens), page_size)
    cached = max_model_len - 1
    items = _batch([1] * FEW_ROWS, page_size, scored=FEW_ROWS, cached=cached)
    return [full, iter([items])]


def _batch(
    lengths: Sequence[int],
    page_size: int,
    *,
    scored: int = 1,
    labels: int = 1,
    every_row: bool = False,
    num_top: int = MAX_TOP,
    parents: Sequence[int] | None = None,
    cached: int = 0,
    kept: int = 0,
) -> PackedBatch:
    """Build a batch of one request on page 0 and state 0, with the log-sum-exp of its rows.

    Args:
        lengths: tokens of each segment.
        page_size: tokens of a page.
        scored: number of scored segments, which are the last ones.
        labels: number of labels of each scored row.
        every_row: each row of the segments is scored, for one label.
        num_top: number of most probable tokens.
        parents: the parent of each segment, or -1; None = all -1.
        cached: length of the cached prefix.
        kept: number of tokens of the first segment whose keys are stored, in slots of page 0.
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
                label_ids=_zeros(labels if is_scored else 0),
                rows=Rows.every(_zeros(length)) if every_row else None,
                need_lse=True,
                states=((length, 0),) if kept and index == 0 else (),
            )
        )
    prefix = Prefix(cached, _zeros(-(-cached // page_size)), 0 if cached else -1)
    return pack(segments, [prefix], num_top=num_top)


def _zeros(count: int) -> Int32Array:
    return np.zeros(count, np.int32)


def _slots(length: int, kept: int, page_size: int) -> Int32Array:
    slots = np.full(length, -1, np.int32)
    slots[:kept] = np.arange(kept) % page_size
    return slots
