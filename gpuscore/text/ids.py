"""Requests of token ids in one piece: what `prompts.factor` finds prompt by prompt, for the common
case in which items begin differently, with a few array operations for all of them together."""

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np

from gpuscore.arrays import Int32Array


def factor_ids(
    query: Sequence[int], items: Sequence[Sequence[int]], *, vocab_rows: int, max_len: int
) -> tuple[Int32Array, tuple[Int32Array, ...]] | None:
    """The query and the items as arrays, if the cut is the query's end and nothing is wrong.

    None means that the request has to be looked at prompt by prompt: items that are empty or share
    their first token, values that are no plain integers or no ids, prompts that are too long.

    Args:
        query, items: token ids, at least one item.
        vocab_rows: valid ids are 0 <= id < vocab_rows.
        max_len: tokens of the longest legal prompt.
    """
    lengths = [len(query), *map(len, items)]
    if min(lengths[1:]) == 0 or lengths[0] + max(lengths[1:]) > max_len:
        return None
    first = items[0][0]
    if len(items) > 1 and all(item[0] == first for item in items):
        return None
    flat = list(chain(query, *items))
    if set(map(type, flat)) != {int}:
        return None
    try:
        wide = np.array(flat, dtype=np.int64)
    except OverflowError:
        return None
    if wide.min() < 0 or wide.max() >= vocab_rows:
        return None
    ids = wide.astype(np.int32)
    ends = list(accumulate(lengths))
    return ids[: ends[0]], tuple(
        ids[start:stop] for start, stop in zip(ends[:-1], ends[1:], strict=True)
    )
