"""A fast path for requests of token ids whose items do not all begin with the same token.

It gives the same result as `factoring.factor`, which reads prompt by prompt, with a few array
operations for all prompts together.
"""

import struct
from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np

from gpuscore.types.arrays import Int32Array


def factor_ids(
    query: Sequence[int], items: Sequence[Sequence[int]], *, vocab_rows: int, max_len: int
) -> tuple[Int32Array, tuple[Int32Array, ...]] | None:
    """Return the query and the items as arrays if the cut is the query's end and all is valid.

    Return None if the request must be read prompt by prompt: an item is empty, all items share
    their first token, a value is no plain integer or no valid id, or a prompt is too long.

    Args:
        query, items: token ids, at least one item.
        vocab_rows: valid ids are 0 <= id < vocab_rows.
        max_len: largest number of tokens of a prompt.
    """
    lengths = [len(query), *map(len, items)]
    if min(lengths[1:]) == 0 or lengths[0] + max(lengths[1:]) > max_len:
        return None
    first = items[0][0]
    if len(items) > 1 and all(item[0] == first for item in items):
        return None
    flat = [*chain(query, *items)]
    if list(map(type, flat)).count(int) < len(flat):
        return None
    try:
        packed = struct.pack(f"{len(flat)}i", *flat)  # in half the time of np.array
    except struct.error:  # over 32 bits
        return None
    ids = np.frombuffer(bytearray(packed), dtype=np.int32)
    if ids.min() < 0 or ids.max() >= vocab_rows:
        return None
    ends = list(accumulate(lengths))
    return ids[: ends[0]], tuple(
        ids[start:stop] for start, stop in zip(ends[:-1], ends[1:], strict=True)
    )
