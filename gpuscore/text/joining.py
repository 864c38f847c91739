"""Building a `ScoreRequest` from the query, items and labels of a caller, with all checks.

Prompts are factored into one query, which is a prefix that they all have, and items:

    prefix length = min(longest common prefix, shortest prompt - 1)

For a single prompt it is at most the length of the caller's query. So the last token of every
prompt belongs to an item, and every scored row is computed.
"""

import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice

import numpy as np

from gpuscore.config import RequestLimits
from gpuscore.errors import PromptTooLong, TooManyItems, TooManyTokens
from gpuscore.text.boundaries import is_long
from gpuscore.text.readouts import check_query, extraction_id, read_at
from gpuscore.text.score_input import (
    LabelReader,
    PromptChecks,
    PromptsFrom,
    ScoreInput,
    need_encoder,
)
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import BackendLimits, Int32Array, common_prefix, int32_array
from gpuscore.types.item_errors import ItemErrors, ItemsRefused
from gpuscore.types.request import ScoreRequest, Terms, most_tokens


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts that are token ids already.

    Args:
        ids: returns the prompts from a number on.
        count: how many they are.
        num_shared: number of first tokens that all share, known from the query alone.
        name: the caller's name for them, for errors.
    """

    ids: PromptsFrom
    count: int
    num_shared: int
    name: str


class PromptBuilder:
    """The builder of one model's requests, with its tokenizer and the limits on a request.

    Args:
        after: tokens of a label that must fit the context after a prompt.
        token: id of a token that every prompt must hold.
    """

    def __init__(
        self,
        encoder: TextEncoder | None,
        backend: BackendLimits,
        limits: RequestLimits,
        after: int = 0,
        token: int | None = None,
    ) -> None:
        self.encoder = encoder
        self.backend = backend
        self.limits = limits
        self.checks = PromptChecks(backend, after, token)
        self._fixed = backend.deterministic_chunk > 0  # the query's length depends on it alone
        self._labels = LabelReader(encoder, self.checks, limits)

    def build(
        self,
        inputs: ScoreInput,
        errors: ItemErrors | None = None,
        default_labels: Sequence[int] | None = None,
    ) -> ScoreRequest | None:
        """Return the request of the items without errors; None if there is none. Long texts take
        seconds.

        Args:
            inputs: the caller's request.
            errors: gets the error of each item that cannot be scored; an item that has one already
                is not read. None: the first error is raised.
            default_labels: the labels of a request that names none; None if it must name some.

        Raises:
            GpuscoreError: the subclass that names the error in the input (with `errors`, only an
                error of the whole request, such as a query that is too long by itself), or
                DeadlineExceeded if the request was given up meanwhile.
        """
        if errors is None:
            return self._build(inputs, default_labels, None)
        if inputs.is_text:
            inputs = inputs.checked(errors)
            if isinstance(inputs.query, str) and is_long(inputs.query):
                self._check_query(inputs)  # else it would be read again for every item
        try:
            return self._build(inputs, default_labels, errors)
        except ItemsRefused:
            if not errors.rest(inputs.items):
                self._check_query(inputs)
                return None
        return self._build(inputs.without(errors), default_labels, None)

    def _build(
        self,
        inputs: ScoreInput,
        default_labels: Sequence[int] | None,
        errors: ItemErrors | None,
    ) -> ScoreRequest | None:
        """Return the request; raise ItemsRefused once every item has an error in `errors`."""
        self.check_count("items", len(inputs.items))
        labels, trie = self._labels.read(inputs, default_labels)
        if not inputs.items:
            return None
        builder = self
        readouts = None
        token = None
        if inputs.extraction is not None:
            token = extraction_id(inputs.extraction, inputs, self.encoder, self.backend)
        if trie is not None or token is not None:  # the last token of a label is not computed
            after = 0 if trie is None else trie.longest - 1
            builder = PromptBuilder(self.encoder, self.backend, self.limits, after, token=token)
        parts = None if inputs.is_text or errors else builder._factor_ids(inputs)
        query, items = builder._factor_prompts(inputs, errors) if parts is None else parts
        if token is not None:
            query, items, labels, readouts = read_at(token, query, items, labels)
        request = ScoreRequest(
            query,
            items,
            labels,
            need_lse=inputs.need_lse or trie is not None,
            **inputs.terms._asdict(),
            readouts=readouts,
            trie=trie,
        )
        self.check_tokens("items", most_tokens(request, self.backend))
        return request

    def _factor_prompts(
        self, inputs: ScoreInput, errors: ItemErrors | None
    ) -> tuple[Int32Array, tuple[Int32Array, ...]]:
        """Make the prompts one by one and return the query and the items."""
        try:
            with self.checks.limit_errors("items[0]"):  # the query is part of every prompt
                if inputs.is_text:
                    prompts, query_length = self._text_prompts(inputs)
                else:
                    prompts, query_length = self._id_prompts(inputs, errors)
                if self._fixed:
                    query_length = self._fixed_prefix_length(inputs)
        except PromptTooLong as error:
            if errors is None or len(inputs.items) > 1:
                raise
            errors.add(0, error)
            raise ItemsRefused from error
        checked = self.checks.checked(prompts, errors=errors)
        limit = self.limits.max_request_tokens
        if not inputs.is_text and not inputs.item_first:
            limit = sys.maxsize  # they are few more than were sent, so the error names their number
        return factor(checked, query_length, limit, fixed=self._fixed)

    def from_prompts(
        self,
        prompts: Prompts,
        label_ids: Sequence[int],
        terms: Terms,
        need_lse: bool,
        num_top: int = 0,
        errors: ItemErrors | None = None,
    ) -> ScoreRequest:
        """Return a request of prompts that are already token ids.

        Args:
            errors: gets the errors of single prompts; ItemsRefused is raised if there are any.
        """
        name = prompts.name
        limit = self.limits.max_request_tokens
        checked = self.checks.checked(prompts.ids, name, errors)
        shared = max(0, prompts.num_shared - 1) if self._fixed else prompts.num_shared
        query, items = factor(checked, shared, limit, name, self._fixed)
        labels = self._labels.same_for_all(label_ids, prompts.count)
        request = ScoreRequest(query, items, labels, need_lse, num_top=num_top, **terms._asdict())
        self.check_tokens(name, request.num_tokens)
        return request

    def whole_prompts(
        self,
        elements: Sequence[str] | Sequence[list[int]],
        *,
        special: bool,
        name: str,
    ) -> tuple[Int32Array, ...]:
        """Return the ids of prompts without factoring them, with all checks.

        Args:
            elements: the prompts, at least one, all text or all ids.
            special: texts get the tokenizer's special tokens.
            name: the caller's name for the prompts, for errors.
        """
        self.check_count(name, len(elements))
        if isinstance(elements[0], str):
            ids = need_encoder(self.encoder, name).prompts(
                elements,  # type: ignore[arg-type]
                special,
                self.backend.max_model_len,
            )
        else:
            for index, prompt in enumerate(elements):
                self.checks.check_length(len(prompt), index, name)
            ids = (self.checks.ids(prompt, f"{name}[{i}]") for i, prompt in enumerate(elements))  # type: ignore[arg-type]
        limit = self.limits.max_request_tokens
        prompts: list[Int32Array] = []
        total = 0
        for checked in self.checks.checked(lambda _: ids, name):
            prompts.append(checked)
            total += len(checked)
            if isinstance(elements[0], str):
                check_partial_total(limit, total, name)
        self.check_tokens(name, total)
        return tuple(prompts)

    def check_count(self, name: str, count: int) -> None:
        """Raise TooManyItems if `count` is over the limit; called before any work on the items."""
        if count > self.limits.max_items:
            raise TooManyItems(f"{count} items, the limit is {self.limits.max_items}", param=name)

    def check_tokens(self, name: str, count: int) -> None:
        """Raise TooManyTokens if `count` is over the limit."""
        limit = self.limits.max_request_tokens
        if count > limit:
            raise TooManyTokens(f"{count} tokens, the limit is {limit}", param=name)

    def _factor_ids(self, inputs: ScoreInput) -> tuple[Int32Array, tuple[Int32Array, ...]] | None:
        """Return the result of `factor`, computed faster; None if that is not possible."""
        size = len(inputs.query) + sum(map(len, inputs.items))
        # With these, the prefix that is split off is not the query.
        other_prefix = inputs.item_first or self._fixed
        needs_token = self.checks.token is not None
        if other_prefix or needs_token or size > self.limits.max_request_tokens:
            return None
        return factor_ids(
            inputs.query,  # type: ignore[arg-type]
            inputs.items,  # type: ignore[arg-type]
            vocab_rows=self.backend.vocab_rows,
            max_len=self.checks.limit,
        )

    def _id_prompts(self, inputs: ScoreInput, errors: ItemErrors | None) -> tuple[PromptsFrom, int]:
        """Return the prompts, and the length of the query at their start."""
        query_length = len(inputs.query)
        for index, item in enumerate(inputs.items):  # before long lists are turned into arrays
            if errors is None:
                self.checks.check_length(query_length + len(item), index)
        query = self.checks.ids(inputs.query or [], "query")  # type: ignore[arg-type]

        def prompt(index: int) -> Int32Array:
            self.checks.check_length(query_length + len(inputs.items[index]), index)
            item = self.checks.ids(inputs.items[index], f"items[{index}]")  # type: ignore[arg-type]
            return np.concatenate((item, query) if inputs.item_first else (query, item))

        count = len(inputs.items)
        prefix_length = 0 if inputs.item_first else query_length
        return lambda start: map(prompt, range(start, count)), prefix_length

    def _text_prompts(self, inputs: ScoreInput) -> tuple[PromptsFrom, int]:
        """Return the prompts, and how many tokens of a single prompt are the query's."""
        encoder = need_encoder(self.encoder, "items")
        limit = self.checks.limit
        query: str = inputs.query or ""  # type: ignore[assignment]
        items: Sequence[str] = inputs.items  # type: ignore[assignment]

        several = len(items) > 1
        if inputs.item_first or (several and self.checks.token is None):
            return encoder.joined(
                query, lambda start: islice(items, start, None), inputs.item_first, limit
            ), 0  # not used
        prompts = encoder.joined(
            query, lambda start: islice((*items, ""), start, None), False, limit
        )
        *prompt, alone = prompts(len(items) if several else 0)
        if self.checks.token is not None:
            check_query(self.checks.token, alone[: len(alone) - encoder.num_closing])
        if several:
            return lambda start: islice(prompts(start), len(items) - start), 0
        return lambda start: iter(prompt[start:]), common_prefix(prompt[0], alone)

    def _fixed_prefix_length(self, inputs: ScoreInput) -> int:
        """Return a prefix length that depends on the query alone: the prefix ends before the last
        token that all prompts share."""
        if inputs.item_first:
            return 0
        if not inputs.is_text:
            return max(0, len(inputs.query) - 1)
        query: str = inputs.query  # type: ignore[assignment]
        shared = need_encoder(self.encoder, "items").num_shared(query, self.checks.limit)
        return max(0, shared - 1)

    def _check_query(self, inputs: ScoreInput) -> None:
        """Raise PromptTooLong, with the query as the culprit, if it is too long by itself."""
        if not len(inputs.query):
            return
        nothing: list[str | list[int]] = [""] if inputs.is_text else [[]]
        whole = inputs.labels is not None or inputs.label_sequences is not None
        labels = None if whole else [0]  # there may be a list for each item
        alone = replace(inputs, items=nothing, label_token_ids=labels, extraction=None)
        try:
            self._build(alone, None, None)
        except PromptTooLong as error:
            message = error.message.replace("items[0]", "query alone")
            raise PromptTooLong(message, param="query") from None


def factor(
    prompts: Iterable[Int32Array],
    query_length: int,
    limit: int = sys.maxsize,
    name: str = "items",
    fixed: bool = False,
) -> tuple[Int32Array, tuple[Int32Array, ...]]:
    """Split prompts (each at least one token) into one query and one item each.

    Only the part of a prompt that differs from the first prompt is kept, to save memory.

    Args:
        prompts: the prompts, at least one.
        query_length: the length of the caller's query, which bounds the prefix of a single prompt.
        limit: largest number of tokens of the query and the items together. More prompts can only
            make the prefix shorter and add tokens, so reading stops once there are more.
        name: the caller's name for the items, for errors.
        fixed: the query's length is `query_length`; all prompts share these tokens and are longer.

    Raises:
        TooManyTokens: names a lower bound of the number.
    """
    remaining = iter(prompts)
    first = next(remaining)
    shared = [len(first)]  # by prompt, how many first tokens it has in common with the first one
    tails = [first[:0]]  # its other tokens
    total = len(first)
    least_shared = query_length if fixed else len(first)
    for prompt in remaining:
        shared.append(common_prefix(first, prompt))
        tails.append(prompt[shared[-1] :].copy())
        total += len(prompt)
        least_shared = min(least_shared, shared[-1])
        check_partial_total(limit, total - (len(shared) - 1) * least_shared, name)
    shortest = min(s + len(tail) for s, tail in zip(shared, tails, strict=True))
    longest_prefix = least_shared if len(shared) > 1 else query_length
    length = min(longest_prefix, shortest - 1)
    items = (np.concatenate((first[length:s], tail)) for s, tail in zip(shared, tails, strict=True))
    return first[:length], tuple(items)


def check_partial_total(limit: int, least: int, name: str) -> None:
    """Raise TooManyTokens if a request, read only in part so far, has over `limit` tokens."""
    if least > limit:
        raise TooManyTokens(f"at least {least} tokens, the limit is {limit}", param=name)


def factor_ids(
    query: Sequence[int], items: Sequence[Sequence[int]], *, vocab_rows: int, max_len: int
) -> tuple[Int32Array, tuple[Int32Array, ...]] | None:
    """Return query and items as arrays if the caller's query is the prefix and all is valid.

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
