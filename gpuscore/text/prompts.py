"""From what a caller sends (query, items, labels) to a `ScoreRequest`, every check included.

The prompts of a request are factored by their longest common prefix, whatever form they came in:

    cut = min(longest common prefix, shortest prompt - 1)

and for a single prompt at most the query's own length. The last token of every prompt therefore
always belongs to an item, and every scored row is computed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpuscore.config import RequestLimits
from gpuscore.errors import (
    DeadlineExceeded,
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
from gpuscore.text.classes import class_ids
from gpuscore.text.ids import factor_ids
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types import NO_TOKENS, BackendLimits, Int32Array, ScoreRequest

FEW = 16  # ids, such as labels, that are checked one by one


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """A caller's request: its fields go together, their values are not yet looked at.

    `query` and `items` are both text or both token ids; an empty query fits either.

    Raises:
        MixedInputTypes, MissingLabels, EmptyLabels, InvalidRequest: on creation, for fields that do
            not go together.
    """

    query: str | list[int]
    items: Sequence[str | list[int]]
    label_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None
    labels: Sequence[str] | None = None
    item_first: bool = False
    need_lse: bool = True
    priority: int = 0

    def __post_init__(self) -> None:
        _is_text(self)
        _check_label_fields(self)


class PromptBuilder:
    """Makes requests for one model; holds its tokenizer and what limits a request."""

    def __init__(
        self, encoder: TextEncoder | None, backend: BackendLimits, limits: RequestLimits
    ) -> None:
        self.encoder, self.backend, self.limits = encoder, backend, limits

    def build(
        self, given: ScoreInput, cancelled: Callable[[], bool] = lambda: False
    ) -> ScoreRequest | None:
        """The request, or None if there are no items. May take long for much text.

        Args:
            given: the caller's request.
            cancelled: asked now and then; once true, the work is given up.

        Raises:
            GpuscoreError: the subclass of the wire contract for whatever is wrong with the input,
                or DeadlineExceeded when cancelled.
        """
        _at_most(TooManyItems, "items", len(given.items), self.limits.max_items)
        is_text = _is_text(given)
        labels = self._labels(given)
        if not given.items:
            return None
        parts = None if is_text else self._ids_at_once(given)
        if parts is None:
            prompts, query_len = (self._text_prompts if is_text else self._id_prompts)(given)
            checked = self._checked(prompts, cancelled)
            if self.backend.deterministic_chunk:
                parts = split(checked, self._fixed_cut(given, is_text))
            else:
                parts = factor(checked, query_len)
        query, items = parts
        request = ScoreRequest(
            query, items, labels, need_lse=given.need_lse, priority=given.priority
        )
        _at_most(TooManyTokens, "items", request.num_tokens, self.limits.max_request_tokens)
        return request

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
        cancelled: Callable[[], bool],
    ) -> ScoreRequest:
        """A request of prompts that somebody else has made.

        Args:
            label_ids: of all prompts, or a list for each.
            name: what the caller calls the items, for errors.
            num_shared: how many first tokens all of them have, as is known from the query alone.
        """
        checked = self._checked(prompts, cancelled, name)
        if self.backend.deterministic_chunk:
            query, items = split(checked, max(0, num_shared - 1))
        else:
            query, items = factor(checked, num_shared)
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
        cancelled: Callable[[], bool],
    ) -> tuple[Int32Array, ...]:
        """The ids of prompts that are not to be factored, all checks made.

        Args:
            given: at least one, all text or all ids.
            special: texts get the tokenizer's special tokens.
            name: what the caller calls them, for errors.
            cancelled: asked now and then; once true, the work is given up.
        """
        self.check_count(name, len(given))
        if isinstance(given[0], str):
            ids = self.need_encoder(name).prompts(given, special)  # type: ignore[arg-type]
        else:
            for index, prompt in enumerate(given):
                self._check_length(len(prompt), index, name)
            ids = (self.ids(prompt, f"{name}[{i}]") for i, prompt in enumerate(given))  # type: ignore[arg-type]
        prompts = tuple(self._checked(ids, cancelled, name))
        _at_most(TooManyTokens, name, sum(map(len, prompts)), self.limits.max_request_tokens)
        return prompts

    def check_count(self, name: str, count: int) -> None:
        """Raises TooManyItems, before any work on them."""
        _at_most(TooManyItems, name, count, self.limits.max_items)

    def _labels(self, given: ScoreInput) -> tuple[Int32Array, ...]:
        """Label ids of every item."""
        if given.labels is not None:
            _at_most(TooManyLabels, "labels", len(given.labels), self.limits.max_labels)
            return self._same_labels(self._named(given.labels), len(given.items))
        ids_or_lists = given.label_token_ids if given.label_token_ids is not None else ()
        lists = _lists(ids_or_lists)
        if not lists:
            return self._same_labels(list(ids_or_lists), len(given.items))  # type: ignore[arg-type]
        return tuple(
            self._label_array(ids, f"label_token_ids[{index}]") for index, ids in enumerate(lists)
        )

    def _named(self, labels: Sequence[str]) -> list[int]:
        """Of a language model the tokens, of a classification model the classes."""
        if self.backend.classes is None:
            return self.need_encoder("labels").label_ids(labels)
        return class_ids(labels, self.backend.classes)

    def _same_labels(self, ids: Sequence[int], num_items: int) -> tuple[Int32Array, ...]:
        return (self._label_array(ids, "label_token_ids"),) * num_items

    def _label_array(self, ids: Sequence[int], param: str) -> Int32Array:
        _at_most(TooManyLabels, param, len(ids), self.limits.max_labels)
        what = "token id" if self.backend.classes is None else "class"
        return self._ids(ids, param, self.backend.label_rows, what)

    def ids(self, values: Sequence[int] | Int32Array, param: str) -> Int32Array:
        """int32 [n], every one a token that the model knows."""
        return self._ids(values, param, self.backend.vocab_rows, "token id")

    def _ids(
        self, values: Sequence[int] | Int32Array, param: str, rows: int, what: str
    ) -> Int32Array:
        """int32 [n], every id one of the `rows` that the model's weights have."""
        if 0 < len(values) <= FEW and all(type(id) is int and 0 <= id < rows for id in values):
            return np.array(values, dtype=np.int32)  # less work than what follows
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
        """What `factor` gives, or None where it has to be asked (or to say what is wrong)."""
        size = len(given.query) + sum(map(len, given.items))
        elsewhere = given.item_first or self.backend.deterministic_chunk  # where the cut is
        if elsewhere or size > self.limits.max_request_tokens:
            return None
        return factor_ids(
            given.query,  # type: ignore[arg-type]
            given.items,  # type: ignore[arg-type]
            vocab_rows=self.backend.vocab_rows,
            max_len=self.backend.max_model_len,
        )

    def _id_prompts(self, given: ScoreInput) -> tuple[Iterator[Int32Array], int]:
        """Prompts one by one, and the query's own length."""
        query_len = len(given.query)
        for index, item in enumerate(given.items):  # before 16 MiB of numbers become an array
            self._check_length(query_len + len(item), index)
        query = self.ids(given.query or [], "query")  # type: ignore[arg-type]
        items = (self.ids(item, f"items[{i}]") for i, item in enumerate(given.items))  # type: ignore[arg-type]
        if given.item_first:
            return (np.concatenate((item, query)) for item in items), 0
        return (np.concatenate((query, item)) for item in items), query_len

    def _text_prompts(self, given: ScoreInput) -> tuple[Iterator[Int32Array], int]:
        """Prompts one by one, and how many of a lone prompt's tokens are the query's."""
        encoder = self.need_encoder("items")
        query: str = given.query or ""  # type: ignore[assignment]
        items: Sequence[str] = given.items  # type: ignore[assignment]
        if given.item_first or len(items) > 1:
            return encoder.joined(query, items, given.item_first), 0  # not looked at
        prompt, alone = encoder.joined(query, [*items, ""], item_first=False)
        return iter([prompt]), _common_prefix(prompt, alone)

    def _fixed_cut(self, given: ScoreInput, is_text: bool) -> int:
        """A cut that depends on the query alone, before the last token that all prompts share."""
        if given.item_first:
            return 0
        query: str = given.query if is_text else ""  # type: ignore[assignment]
        shared = self.need_encoder("items").num_shared(query) if is_text else len(given.query)
        return max(0, shared - 1)

    def _checked(
        self, prompts: Iterator[Int32Array], cancelled: Callable[[], bool], name: str = "items"
    ) -> Iterator[Int32Array]:
        """The same prompts, each of a legal length and with ids that the weights have."""
        for index, prompt in enumerate(prompts):
            if cancelled():
                raise DeadlineExceeded("the request was given up")
            self._check_length(len(prompt), index, name)
            if prompt.max() >= self.backend.vocab_rows:  # a tokenizer may know more than that
                self.ids(prompt, f"{name}[{index}]")
            yield prompt

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
        """Raises InvalidRequest, about this field, for a model without a tokenizer."""
        if self.encoder is None:
            raise InvalidRequest("this model has no tokenizer: send token ids", param=param)
        return self.encoder


def factor(
    prompts: Iterable[Int32Array], query_len: int
) -> tuple[Int32Array, tuple[Int32Array, ...]]:
    """Split prompts (each at least one token) at the cut, into one query and an item each.

    Of every prompt only what differs from the first is kept, so that many long prompts need
    little memory.

    Args:
        prompts: at least one.
        query_len: the query's own length, which bounds the cut of a single prompt.
    """
    remaining = iter(prompts)
    first = next(remaining)
    shared, tails = [len(first)], [first[:0]]
    for prompt in remaining:
        shared.append(_common_prefix(first, prompt))
        tails.append(prompt[shared[-1] :].copy())
    shortest = min(s + len(tail) for s, tail in zip(shared, tails, strict=True))
    cut = min(*shared, shortest - 1) if len(shared) > 1 else min(query_len, shortest - 1)
    items = (np.concatenate((first[cut:s], tail)) for s, tail in zip(shared, tails, strict=True))
    return first[:cut], tuple(items)


def split(prompts: Iterable[Int32Array], cut: int) -> tuple[Int32Array, tuple[Int32Array, ...]]:
    """Split prompts, the same up to `cut` and longer than it, into one query and an item each."""
    first, items = None, []
    for prompt in prompts:
        first = prompt if first is None else first
        items.append(prompt[cut:].copy())  # and not a view, which would keep the whole prompt
    assert first is not None  # noqa: S101  (there is at least one)
    return first[:cut], tuple(items)


def _common_prefix(a: Int32Array, b: Int32Array) -> int:
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length


def _is_text(given: ScoreInput) -> bool:
    """True for text, False for token ids; raises MixedInputTypes for both at once."""
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
        raise MissingLabels("label_token_ids or labels is required", param="label_token_ids")
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
    """The lists of one item each, or nothing if all items have the same labels."""
    return [x for x in labels if not isinstance(x, int | np.integer)]


def _some_label(labels: Sequence[object], param: str) -> None:
    if not len(labels):
        raise EmptyLabels(f"{param} must hold at least one label", param=param)


def _at_most(error: type[GpuscoreError], param: str, count: int, limit: int) -> None:
    if count > limit:
        what = {"TooManyTokens": "tokens", "TooManyItems": "items"}.get(error.__name__, "labels")
        raise error(f"{count} {what}, the limit is {limit}", param=param)
