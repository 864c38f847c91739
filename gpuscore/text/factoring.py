"""Prompts as one query and items: factored by their longest common prefix, whatever form they
came in:

    cut = min(longest common prefix, shortest prompt - 1)

and for a single prompt at most the query's own length. The last token of every prompt therefore
always belongs to an item, and every scored row is computed.
"""

import sys
from collections.abc import Iterable

import numpy as np

from gpuscore.arrays import Int32Array
from gpuscore.errors import TooManyTokens


def factor(
    prompts: Iterable[Int32Array], query_len: int, most: int = sys.maxsize, name: str = "items"
) -> tuple[Int32Array, tuple[Int32Array, ...]]:
    """Split prompts (each at least one token) at the cut, into one query and an item each.

    Of every prompt only what differs from the first is kept, so that many long prompts need
    little memory.

    Args:
        prompts: at least one.
        query_len: the query's own length, which bounds the cut of a single prompt.
        most: tokens of the query and the items together. Further prompts can only add to their
            number, and move the cut to the left, so none is asked for once it is over that.
        name: what the caller calls the items, for errors.

    Raises:
        TooManyTokens: with how many there are at least.
    """
    remaining = iter(prompts)
    first = next(remaining)
    shared, tails = [len(first)], [first[:0]]
    total, lowest = len(first), len(first)
    for prompt in remaining:
        shared.append(common_prefix(first, prompt))
        tails.append(prompt[shared[-1] :].copy())
        total, lowest = total + len(prompt), min(lowest, shared[-1])
        stop_over(most, total - (len(shared) - 1) * lowest, name)
    shortest = min(s + len(tail) for s, tail in zip(shared, tails, strict=True))
    cut = min(*shared, shortest - 1) if len(shared) > 1 else min(query_len, shortest - 1)
    items = (np.concatenate((first[cut:s], tail)) for s, tail in zip(shared, tails, strict=True))
    return first[:cut], tuple(items)


def split(
    prompts: Iterable[Int32Array], cut: int, most: int = sys.maxsize, name: str = "items"
) -> tuple[Int32Array, tuple[Int32Array, ...]]:
    """Split prompts, the same up to `cut` and longer than it, into one query and an item each;
    further arguments and errors as `factor`."""
    first, items, total = None, [], cut
    for prompt in prompts:
        first = prompt if first is None else first
        items.append(prompt[cut:].copy())  # and not a view, which would keep the whole prompt
        total += len(prompt) - cut
        stop_over(most, total, name)
    assert first is not None  # noqa: S101  (there is at least one)
    return first[:cut], tuple(items)


def stop_over(most: int, least: int, name: str) -> None:
    """Refuse a request of which not all is known."""
    if least > most:
        raise TooManyTokens(f"at least {least} tokens, the limit is {most}", param=name)


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length
