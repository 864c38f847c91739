"""Building a `ScoreRequest` from the query, items and labels of a caller, with all checks."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from gpuscore.arrays import NO_TOKENS, Int32Array
from gpuscore.config import RequestLimits
from gpuscore.errors import (
    EmptyLabels,
    EmptyPrompt,
    GpuscoreError,
    InvalidRequest,
    MissingLabels,
    MixedInputTypes,
    PromptTooLong,
    TokenIdOutOfRange,
    TooManyItems,
    TooManyLabels,
    TooManyTokens,
)
from gpuscore.limits import BackendLimits
from gpuscore.request import ScoreRequest
from gpuscore.text.classes import class_ids
from gpuscore.text.factoring import common_prefix, factor, split, stop_over
from gpuscore.text.ids import factor_ids
from gpuscore.text.pieces import OverLimit
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.text.turns import ALONE, COPIED, Turns

Labels = tuple[Int32Array, ...]  # the label ids of every item
FEW = 16  # up to this many ids are checked one by one


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """A caller's request with fields that fit together; their values are checked later.

    `query` and `items` are both text or both token ids; an empty query fits either. Without
    `label_token_ids` and `labels` the model's default labels are meant.

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
    item_first: bool = False
    need_lse: bool = True
    priority: int = 0
    is_text: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_text", _is_text(self))
        _check_label_fields(self)

    def check_labels(self, default: Sequence[int] | None) -> None:
        """Raise MissingLabels if neither the request nor the model names labels."""
        if self.labels is None and self.label_token_ids is None and default is None:
            raise MissingLabels("label_token_ids or labels is required", param="label_token_ids")


class PromptBuilder:
    """The builder of one model's requests, with its tokenizer and the limits on a request."""

    def __init__(
        self, encoder: TextEncoder | None, backend: BackendLimits, limits: RequestLimits
    ) -> None:
        self.encoder, self.backend, self.limits = encoder, backend, limits

    def build(
        self,
        given: ScoreInput,
        turns: Turns = ALONE,
        default_labels: Sequence[int] | None = None,
    ) -> ScoreRequest | None:
        """Return the request, or None if it has no items. Long texts take seconds.

        Args:
            given: the caller's request.
            turns: called before every piece of work.
            default_labels: the labels of a request that names none; None if it must name some.

        Raises:
            GpuscoreError: the subclass that names the error in the input, or DeadlineExceeded if
                the request was given up meanwhile.
        """
        _at_most(TooManyItems, "items", len(given.items), self.limits.max_items)
        labels = self._labels(given, default_labels, turns)
        if not given.items:
            return None
        parts = None if given.is_text else self._ids_at_once(given)
        if parts is None:
            parts = self._one_by_one(given, turns)
        query, items = parts
        request = ScoreRequest(
            query, items, labels, need_lse=given.need_lse, priority=given.priority
        )
        _at_most(TooManyTokens, "items", request.num_tokens, self.limits.max_request_tokens)
        return request

    def _one_by_one(
        self, given: ScoreInput, turns: Turns
    ) -> tuple[Int32Array, tuple[Int32Array, ...]]:
        """Make the prompts one by one and return the query and the items."""
        with self._too_long("items[0]"):  # the query is part of every prompt
            if given.is_text:
                prompts, query_len = self._text_prompts(given, turns)
            else:
                prompts, query_len = self._id_prompts(given)
            cut = self._fixed_cut(given, turns) if self.backend.deterministic_chunk else 0
        checked = self._checked(prompts, turns)
        # Token ids are cheap to count, so the error names their full number.
        most = self.limits.max_request_tokens if given.is_text else sys.maxsize
        if self.backend.deterministic_chunk:
            return split(checked, cut, most)
        return factor(checked, query_len, most)

    def from_prompts(
        self,
        prompts: Iterator[Int32Array],
        *,
        num_prompts: int,
        num_shared: int,
        label_ids: Sequence[int] | Sequence[Sequence[int]],
        need_lse: bool,
        priority: int,
        name: str,
        turns: Turns,
    ) -> ScoreRequest:
        """Return a request of prompts that are already token ids.

        Args:
            prompts: the ids of each prompt.
            label_ids: one list for all prompts, or one list for each.
            name: the caller's name for the items, for errors.
            num_shared: number of first tokens that all prompts share, known from the query alone.
        """
        checked = self._checked(prompts, turns, name)
        most = self.limits.max_request_tokens
        if self.backend.deterministic_chunk:
            query, items = split(checked, max(0, num_shared - 1), most, name)
        else:
            query, items = factor(checked, num_shared, most, name)
        lists = _lists(label_ids)
        labels = (
            tuple(self._label_array(ids, name) for ids in lists)
            if lists
            else self._same_labels(label_ids, num_prompts)  # type: ignore[arg-type]
        )
        request = ScoreRequest(query, items, labels, need_lse=need_lse, priority=priority)
        _at_most(TooManyTokens, name, request.num_tokens, self.limits.max_request_tokens)
        return request

    def whole_prompts(
        self,
        given: Sequence[str] | Sequence[list[int]],
        *,
        special: bool,
        name: str,
        turns: Turns,
    ) -> tuple[Int32Array, ...]:
        """Return the ids of prompts without factoring them, with all checks.

        Args:
            given: at least one prompt, all text or all ids.
            special: texts get the tokenizer's special tokens.
            name: the caller's name for the prompts, for errors.
            turns: called before every piece of work.
        """
        self.check_count(name, len(given))
        if isinstance(given[0], str):
            ids = self.need_encoder(name).prompts(
                given,  # type: ignore[arg-type]
                special,
                turns,
                self.backend.max_model_len,
            )
        else:
            for index, prompt in enumerate(given):
                self._check_length(len(prompt), index, name)
            ids = (self.ids(prompt, f"{name}[{i}]") for i, prompt in enumerate(given))  # type: ignore[arg-type]
        most = self.limits.max_request_tokens
        prompts: list[Int32Array] = []
        total = 0
        for made in self._checked(ids, turns, name):
            prompts.append(made)
            total += len(made)
            if isinstance(given[0], str):
                stop_over(most, total, name)
        _at_most(TooManyTokens, name, total, most)
        return tuple(prompts)

    def check_count(self, name: str, count: int) -> None:
        """Raise TooManyItems if `count` is over the limit; called before any work on the items."""
        _at_most(TooManyItems, name, count, self.limits.max_items)

    def _labels(self, given: ScoreInput, default: Sequence[int] | None, turns: Turns) -> Labels:
        """Return the label ids of every item."""
        if given.labels is not None:
            _at_most(TooManyLabels, "labels", len(given.labels), self.limits.max_labels)
            return self._same_labels(self._named(given.labels, turns), len(given.items))
        given.check_labels(default)
        ids_or_lists = given.label_token_ids if given.label_token_ids is not None else default or ()
        lists = _lists(ids_or_lists)
        if not lists:
            return self._same_labels(list(ids_or_lists), len(given.items))  # type: ignore[arg-type]
        return tuple(
            self._label_array(ids, f"label_token_ids[{index}]") for index, ids in enumerate(lists)
        )

    def _named(self, labels: Sequence[str], turns: Turns) -> list[int]:
        """Return the labels' tokens, or for a classification model their classes."""
        if self.backend.classes is None:
            return self.need_encoder("labels").label_ids(labels, turns)
        return class_ids(labels, self.backend.classes)

    def _same_labels(self, ids: Sequence[int], num_items: int) -> Labels:
        return (self._label_array(ids, "label_token_ids"),) * num_items

    def _label_array(self, ids: Sequence[int], param: str) -> Int32Array:
        _at_most(TooManyLabels, param, len(ids), self.limits.max_labels)
        what = "token id" if self.backend.classes is None else "class"
        return self._ids(ids, param, self.backend.label_rows, what)

    def ids(self, values: Sequence[int] | Int32Array, param: str) -> Int32Array:
        """Return valid token ids as int32 [n]; raise an error that names an invalid one."""
        return self._ids(values, param, self.backend.vocab_rows, "token id")

    def _ids(
        self, values: Sequence[int] | Int32Array, param: str, rows: int, what: str
    ) -> Int32Array:
        """Return ids as int32 [n], each of them 0 <= id < rows; `what` names them in errors."""
        if 0 < len(values) <= FEW and all(type(id) is int and 0 <= id < rows for id in values):
            return np.array(values, dtype=np.int32)  # faster than the array operations below
        ids = np.asarray(values)
        if ids.size == 0:
            return NO_TOKENS
        if ids.dtype not in (np.int64, np.int32) or ids.ndim != 1:
            raise InvalidRequest(f"{param} must hold integers of at most 64 bits", param=param)
        wrong = (ids < 0) | (ids >= rows)
        if wrong.any():
            index = int(wrong.argmax())
            raise TokenIdOutOfRange(
                f"{param} holds {what} {ids[index]}, valid are 0 to {rows - 1}",
                param=param,
            )
        return ids.astype(np.int32)

    def _ids_at_once(self, given: ScoreInput) -> tuple[Int32Array, tuple[Int32Array, ...]] | None:
        """Return the same as `factor`, by a faster way; None if that does not apply."""
        size = len(given.query) + sum(map(len, given.items))
        # With these, the cut is not the end of the query.
        elsewhere = given.item_first or self.backend.deterministic_chunk
        if elsewhere or size > self.limits.max_request_tokens:
            return None
        return factor_ids(
            given.query,  # type: ignore[arg-type]
            given.items,  # type: ignore[arg-type]
            vocab_rows=self.backend.vocab_rows,
            max_len=self.backend.max_model_len,
        )

    def _id_prompts(self, given: ScoreInput) -> tuple[Iterator[Int32Array], int]:
        """Return an iterator over the prompts, and the query's own length."""
        query_len = len(given.query)
        for index, item in enumerate(given.items):  # before long lists are turned into arrays
            self._check_length(query_len + len(item), index)
        query = self.ids(given.query or [], "query")  # type: ignore[arg-type]
        items = (self.ids(item, f"items[{i}]") for i, item in enumerate(given.items))  # type: ignore[arg-type]
        if given.item_first:
            return (np.concatenate((item, query)) for item in items), 0
        return (np.concatenate((query, item)) for item in items), query_len

    def _text_prompts(self, given: ScoreInput, turns: Turns) -> tuple[Iterator[Int32Array], int]:
        """Return an iterator over the prompts, and the query's tokens in a single prompt."""
        encoder, limit = self.need_encoder("items"), self.backend.max_model_len
        query: str = given.query or ""  # type: ignore[assignment]
        items: Sequence[str] = given.items  # type: ignore[assignment]
        if given.item_first or len(items) > 1:
            return encoder.joined(query, items, given.item_first, turns, limit), 0  # not used
        prompt, alone = encoder.joined(query, [*items, ""], False, turns, limit)
        return iter([prompt]), common_prefix(prompt, alone)

    def _fixed_cut(self, given: ScoreInput, turns: Turns) -> int:
        """Return a cut that depends on the query alone: before the last token all prompts share."""
        if given.item_first:
            return 0
        if not given.is_text:
            return max(0, len(given.query) - 1)
        query: str = given.query  # type: ignore[assignment]
        shared = self.need_encoder("items").num_shared(query, turns, self.backend.max_model_len)
        return max(0, shared - 1)

    def _checked(
        self, prompts: Iterator[Int32Array], turns: Turns, name: str = "items"
    ) -> Iterator[Int32Array]:
        """Yield the prompts; raise an error for a bad length or an id that the model lacks."""
        for index in count():
            with self._too_long(f"{name}[{index}]"):
                prompt = next(prompts, None)
            if prompt is None:
                return
            turns.before(len(prompt) // COPIED)  # for the copies that are made of it
            self._check_length(len(prompt), index, name)
            if prompt.max() >= self.backend.vocab_rows:  # a tokenizer can have more ids than that
                self.ids(prompt, f"{name}[{index}]")
            yield prompt

    @contextmanager
    def _too_long(self, param: str) -> Iterator[None]:
        """Raise OverLimit as PromptTooLong."""
        try:
            yield
        except OverLimit as over:
            raise PromptTooLong(
                f"{param} gives a prompt of at least {over.least} tokens, "
                f"the limit is {self.backend.max_model_len}",
                param=param,
            ) from None

    def _check_length(self, length: int, index: int, name: str = "items") -> None:
        param = f"{name}[{index}]"
        if length == 0:
            raise EmptyPrompt(f"{param} gives a prompt of 0 tokens", param=param)
        if length > self.backend.max_model_len:
            raise PromptTooLong(
                f"{param} gives a prompt of {length} tokens, "
                f"the limit is {self.backend.max_model_len}",
                param=param,
            )

    def need_encoder(self, param: str) -> TextEncoder:
        """Return the tokenizer; raise InvalidRequest, naming this field, if there is none."""
        if self.encoder is None:
            raise InvalidRequest("this model has no tokenizer: send token ids", param=param)
        return self.encoder


def _is_text(given: ScoreInput) -> bool:
    """Return True for text, False for token ids; raise MixedInputTypes for both at once."""
    kinds = {issubclass(kind, str) for kind in set(map(type, given.items))}
    if len(given.query):
        kinds.add(isinstance(given.query, str))
    if len(kinds) > 1:
        raise MixedInputTypes("query and items must be all text or all token ids", param="items")
    return kinds == {True}


def _check_label_fields(given: ScoreInput) -> None:
    if given.labels is not None and given.label_token_ids is not None:
        raise InvalidRequest("labels and label_token_ids exclude each other", param="labels")
    if given.labels is not None:
        _some_label(given.labels, "labels")
        return
    if given.label_token_ids is None:
        return
    _some_label(given.label_token_ids, "label_token_ids")
    lists = _lists(given.label_token_ids)
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


def _lists(labels: Sequence[int] | Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Return the lists with one item's labels each; empty if all items have the same labels."""
    return [x for x in labels if not isinstance(x, int | np.integer)]


def _some_label(labels: Sequence[object], param: str) -> None:
    if not len(labels):
        raise EmptyLabels(f"{param} must hold at least one label", param=param)


def _at_most(error: type[GpuscoreError], param: str, count: int, limit: int) -> None:
    if count > limit:
        what = {"TooManyTokens": "tokens", "TooManyItems": "items"}.get(error.__name__, "labels")
        raise error(f"{count} {what}, the limit is {limit}", param=param)
