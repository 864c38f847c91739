"""A caller's query, items and labels, with fields that fit together; and factoring of prompts into
one query and items, at their longest common prefix.

    cut = min(longest common prefix, shortest prompt - 1)

For a single prompt the cut is at most the query's own length. So the last token of every prompt
belongs to an item, and every scored row is computed.
"""

import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

import numpy as np

from gpuscore.errors import (
    EmptyLabels,
    InvalidRequest,
    MissingLabels,
    MixedInputTypes,
    TooManyTokens,
)
from gpuscore.types.batch import (
    BackendLimits,
    Int32Array,
    common_prefix,
    int32_array,
    sorted_order,
)
from gpuscore.types.request import Terms
from gpuscore.types.results import ItemErrors, check_text, checked_texts


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """A caller's request with fields that fit together; their values are checked later.

    `query` and `items` are both text or both token ids; an empty query fits either. Without
    `label_token_ids`, `labels` and `label_sequences` the model's default labels are meant.

    Attributes:
        is_text: True if there is any text; False for token ids, and if all is empty.

    Raises:
        MixedInputTypes, EmptyLabels, InvalidRequest: on creation, if the fields do not fit
            together.
    """

    query: str | list[int]
    items: Sequence[str | list[int]]
    label_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None
    labels: Sequence[str] | None = None
    label_sequences: Sequence[Sequence[int]] | None = None
    item_first: bool = False
    need_lse: bool = True
    terms: Terms = Terms()
    is_text: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_text", _is_text(self))
        _check_label_fields(self)

    def check_labels(self, default: Sequence[int] | None) -> None:
        """Raise MissingLabels if neither the request nor the model names labels."""
        sources = (self.labels, self.label_token_ids, self.label_sequences, default)
        if all(labels is None for labels in sources):
            raise MissingLabels("label_token_ids or labels is required", param="label_token_ids")

    def checked(self, errors: ItemErrors) -> "ScoreInput":
        """Return the input; texts that cannot be read become empty and get errors.

        Raises:
            InvalidRequest: the query cannot be read.
        """
        check_text(self.query or "", "query")
        return replace(self, items=checked_texts(self.items, "items", errors))

    def without(self, errors: ItemErrors) -> "ScoreInput":
        """Return the input without the items that have errors, and without their labels."""
        labels = self.label_token_ids
        if labels is not None and (lists := lists_of(labels)):
            labels = errors.rest(lists)
        return replace(self, items=errors.rest(self.items), label_token_ids=labels)


def _is_text(inputs: ScoreInput) -> bool:
    """Return True for text, False for token ids; raise MixedInputTypes for both at once."""
    kinds = {issubclass(kind, str) for kind in set(map(type, inputs.items))}
    if len(inputs.query):
        kinds.add(isinstance(inputs.query, str))
    if len(kinds) > 1:
        raise MixedInputTypes("query and items must be all text or all token ids", param="items")
    return kinds == {True}


def _check_label_fields(inputs: ScoreInput) -> None:
    fields = ("labels", "label_sequences", "label_token_ids")
    named = [name for name in fields if getattr(inputs, name) is not None]
    if len(named) > 1:
        raise InvalidRequest(f"{' and '.join(named)} exclude each other", param=named[0])
    if inputs.labels is not None:
        _some_label(inputs.labels, "labels")
        return
    if inputs.label_sequences is not None:
        _check_sequences(inputs.label_sequences)
    if inputs.label_token_ids is None:
        return
    _some_label(inputs.label_token_ids, "label_token_ids")
    lists = lists_of(inputs.label_token_ids)
    if len(lists) not in (0, len(inputs.label_token_ids)):
        raise InvalidRequest(
            "label_token_ids must be integers, or one list of integers per item",
            param="label_token_ids",
        )
    if lists and len(lists) != len(inputs.items):
        raise InvalidRequest(
            f"label_token_ids has {len(lists)} lists for {len(inputs.items)} items",
            param="label_token_ids",
        )
    for index, ids in enumerate(lists):
        _some_label(ids, f"label_token_ids[{index}]")


def _check_sequences(sequences: Sequence[Sequence[int]]) -> None:
    _some_label(sequences, "label_sequences")
    if len(lists_of(sequences)) < len(sequences):
        raise InvalidRequest(
            "label_sequences must be lists of integers, one per label", param="label_sequences"
        )
    for index, ids in enumerate(sequences):
        if not len(ids):
            param = f"label_sequences[{index}]"
            raise EmptyLabels(f"{param} must hold at least one token id", param=param)


def lists_of(labels: Sequence[int] | Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Return the lists with one item's labels each; empty if all items have the same labels."""
    return [x for x in labels if not isinstance(x, int | np.integer)]


def _some_label(labels: Sequence[object], param: str) -> None:
    if not len(labels):
        raise EmptyLabels(f"{param} must hold at least one label", param=param)


LEAST_SHARED = 4  # tokens: a cut costs all items one more pass of attention


def factor(
    prompts: Iterable[Int32Array], query_len: int, most: int = sys.maxsize, name: str = "items"
) -> tuple[Int32Array, tuple[Int32Array, ...]]:
    """Split prompts (each at least one token) at the cut, into one query and one item each.

    Only the part of a prompt that differs from the first prompt is kept, to save memory.

    Args:
        prompts: at least one.
        query_len: the query's own length, which bounds the cut of a single prompt.
        most: limit on the tokens of the query and the items together. More prompts can only move
            the cut to the left and add tokens, so reading stops once the number is over the limit.
        name: the caller's name for the items, for errors.

    Raises:
        TooManyTokens: names a lower bound of the number.
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
    """Split prompts at a known cut into one query and one item each.

    All prompts must be equal up to `cut` and longer than it. The other arguments and the errors are
    as in `factor`.
    """
    first, items, total = None, [], cut
    for prompt in prompts:
        first = prompt if first is None else first
        items.append(prompt[cut:].copy())  # a view would keep the whole prompt in memory
        total += len(prompt) - cut
        stop_over(most, total, name)
    assert first is not None  # noqa: S101  (there is at least one)
    return first[:cut], tuple(items)


def alike(prompts: Sequence[Int32Array], most: int) -> list[list[int]]:
    """Divide prompts into groups that share most of their tokens, such as choices of one context.

    Sorted prompts are neighbours if they begin alike, and stay together if they share three
    quarters of the shorter one.

    Returns:
        The numbers of each group's prompts, in order; one group of all if there would be over
        `most` groups.
    """
    order = sorted_order(prompts)
    groups = [order[:1]]
    for previous, other in zip(order, order[1:], strict=False):
        shorter = min(len(prompts[previous]), len(prompts[other]))
        if 4 * common_prefix(prompts[previous], prompts[other]) < 3 * shorter:
            groups.append([])
        groups[-1].append(other)
    if len(groups) > most:
        return [[*range(len(prompts))]]
    return sorted(sorted(group) for group in groups)


def positions_cut(prompts: Sequence[Int32Array], backend: BackendLimits) -> int:
    """Return the number of first tokens that are scored once for all these prompts.

    All rows up to the cut get the same labels, the tokens that follow. So the cut is one token
    before the end of what the prompts share. Of a single prompt, full pages are enough, because
    nothing else is found again. It is 0 if sharing saves nothing, or if the pages are too few.
    """
    first = prompts[0]
    shared = min([len(first), *(common_prefix(first, prompt) for prompt in prompts[1:])])
    # With the bits of a prompt that is scored alone, all segments begin where chunks do.
    whole = backend.deterministic_chunk or (backend.page_size if len(prompts) == 1 else 1)
    cut = (shared - 1) // whole * whole
    pages = -(-max(map(len, prompts)) // backend.page_size) + 1
    return cut if cut >= LEAST_SHARED and pages <= backend.num_pages else 0


def stop_over(most: int, least: int, name: str) -> None:
    """Raise TooManyTokens if a request, read only in part so far, has over `most` tokens."""
    if least > most:
        raise TooManyTokens(f"at least {least} tokens, the limit is {most}", param=name)


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
        ids = int32_array(flat)
    except struct.error:  # over 32 bits
        return None
    if ids.view(np.uint32).max() >= vocab_rows:  # negative ids become large ones
        return None
    ends = list(accumulate(lengths))
    return ids[: ends[0]], tuple(
        ids[start:stop] for start, stop in zip(ends[:-1], ends[1:], strict=True)
    )
