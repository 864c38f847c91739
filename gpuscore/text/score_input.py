"""A caller's query, items and labels, with fields that fit together."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gpuscore.errors import EmptyLabels, InvalidRequest, MissingLabels, MixedInputTypes
from gpuscore.types.item_errors import ItemErrors, check_text, checked_texts


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """A caller's request with fields that fit together; their values are checked later.

    `query` and `items` are both text or both token ids; an empty query fits either. Without
    `label_token_ids`, `labels` and `label_sequences` the model's default labels are meant.

    Attributes:
        one_token: each of `labels` must be exactly one token.
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
    one_token: bool = False
    item_first: bool = False
    need_lse: bool = True
    priority: int = 0
    is_text: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_text", _is_text(self))
        _check_label_fields(self)

    def check_labels(self, default: Sequence[int] | None) -> None:
        """Raise MissingLabels if neither the request nor the model names labels."""
        given = (self.labels, self.label_token_ids, self.label_sequences, default)
        if all(labels is None for labels in given):
            raise MissingLabels("label_token_ids or labels is required", param="label_token_ids")

    def checked(self, errors: ItemErrors) -> "ScoreInput":
        """Return texts with empty ones in the place of those that cannot be read, which get errors.

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


def _is_text(given: ScoreInput) -> bool:
    """Return True for text, False for token ids; raise MixedInputTypes for both at once."""
    kinds = {issubclass(kind, str) for kind in set(map(type, given.items))}
    if len(given.query):
        kinds.add(isinstance(given.query, str))
    if len(kinds) > 1:
        raise MixedInputTypes("query and items must be all text or all token ids", param="items")
    return kinds == {True}


def _check_label_fields(given: ScoreInput) -> None:
    fields = ("labels", "label_sequences", "label_token_ids")
    named = [name for name in fields if getattr(given, name) is not None]
    if len(named) > 1:
        raise InvalidRequest(f"{' and '.join(named)} exclude each other", param=named[0])
    if given.labels is not None:
        _some_label(given.labels, "labels")
        return
    if given.label_sequences is not None:
        _check_sequences(given.label_sequences)
    if given.label_token_ids is None:
        return
    _some_label(given.label_token_ids, "label_token_ids")
    lists = lists_of(given.label_token_ids)
    if len(lists) not in (0, len(given.label_token_ids)):
        raise InvalidRequest(
            "label_token_ids must be integers, or one list of integers per item",
            param="label_token_ids",
        )
    if lists and len(lists) != len(given.items):
        raise InvalidRequest(
            f"label_token_ids has {len(lists)} lists for {len(given.items)} items",
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
