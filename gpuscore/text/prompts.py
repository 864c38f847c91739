"""From what a caller sends (query, items, labels) to a `ScoreRequest`, every check included.

The prompts of a request are factored by their longest common prefix, whatever form they came in:

    cut = min(longest common prefix, shortest prompt - 1)

and for a single prompt at most the query's own length. The last token of every prompt therefore
always belongs to an item, and every scored row is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpuscore.config import RequestLimits
from gpuscore.errors import (
    EmptyPrompt,
    GpuscoreError,
    InvalidRequest,
    MixedInputTypes,
    PromptTooLong,
    TokenIdOutOfRange,
    TooManyItems,
    TooManyLabels,
    TooManyTokens,
)
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types import NO_TOKENS, BackendLimits, Int32Array, ScoreRequest


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """A caller's request, shape-checked but not yet looked at closely.

    `query` and `items` are both text or both token ids; an empty query fits either.
    """

    query: str | list[int]
    items: Sequence[str | list[int]]
    label_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None
    labels: Sequence[str] | None = None
    item_first: bool = False
    need_lse: bool = True
    priority: int = 0


class PromptBuilder:
    """Makes requests for one model; holds its tokenizer and what limits a request."""

    def __init__(
        self, encoder: TextEncoder | None, backend: BackendLimits, limits: RequestLimits
    ) -> None:
        self.encoder, self.backend, self.limits = encoder, backend, limits

    def build(self, given: ScoreInput) -> ScoreRequest | None:
        """The request, or None if there are no items. May take long for much text.

        Raises:
            GpuscoreError: the subclass of the wire contract for whatever is wrong with the input.
        """
        _at_most(TooManyItems, "items", len(given.items), self.limits.max_items)
        is_text = _is_text(given)
        labels = self._labels(given)
        if not given.items:
            return None
        if is_text:
            prompts, query_len = self._text_prompts(given)
        else:
            prompts, query_len = self._id_prompts(given)
        self._check_lengths(prompts)
        query, items = factor(prompts, query_len)
        request = ScoreRequest(
            query, items, labels, need_lse=given.need_lse, priority=given.priority
        )
        self._check_size(request)
        return request

    def _labels(self, given: ScoreInput) -> tuple[Int32Array, ...]:
        """Label ids of every item."""
        if given.labels is not None and given.label_token_ids is not None:
            raise InvalidRequest("labels and label_token_ids exclude each other", param="labels")
        if given.labels is not None:
            _label_count(len(given.labels), self.limits.max_labels, "labels")
            ids = self._need_encoder("labels").label_ids(given.labels)
            return self._same_labels(ids, len(given.items))
        if given.label_token_ids is None:
            raise InvalidRequest("label_token_ids or labels is required", param="label_token_ids")
        lists = [x for x in given.label_token_ids if not isinstance(x, int | np.integer)]
        if not lists:
            return self._same_labels(list(given.label_token_ids), len(given.items))  # type: ignore[arg-type]
        if len(lists) != len(given.label_token_ids):
            raise InvalidRequest(
                "label_token_ids must be integers, or one list of integers per item",
                param="label_token_ids",
            )
        if len(lists) != len(given.items):
            raise InvalidRequest(
                f"label_token_ids has {len(lists)} lists for {len(given.items)} items",
                param="label_token_ids",
            )
        return tuple(
            self._label_array(ids, f"label_token_ids[{index}]") for index, ids in enumerate(lists)
        )

    def _same_labels(self, ids: Sequence[int], num_items: int) -> tuple[Int32Array, ...]:
        return (self._label_array(ids, "label_token_ids"),) * num_items

    def _label_array(self, ids: Sequence[int], param: str) -> Int32Array:
        _label_count(len(ids), self.limits.max_labels, param)
        return self._ids(ids, param)

    def _ids(self, values: Sequence[int] | Int32Array, param: str) -> Int32Array:
        """int32 [n], every id one that the model's weights know."""
        ids = np.asarray(values)
        if ids.size == 0:
            return NO_TOKENS
        if ids.dtype not in (np.int64, np.int32) or ids.ndim != 1:
            raise InvalidRequest(f"{param} must hold integers of at most 64 bits", param=param)
        wrong = (ids < 0) | (ids >= self.backend.vocab_rows)
        if wrong.any():
            index = int(wrong.argmax())
            raise TokenIdOutOfRange(
                f"{param} holds token id {ids[index]}, "
                f"valid are 0 to {self.backend.vocab_rows - 1}",
                param=param,
            )
        return ids.astype(np.int32)

    def _id_prompts(self, given: ScoreInput) -> tuple[list[Int32Array], int]:
        query = self._ids(given.query or [], "query")  # type: ignore[arg-type]
        items = [self._ids(item, f"items[{i}]") for i, item in enumerate(given.items)]  # type: ignore[arg-type]
        if given.item_first:
            return [np.concatenate((item, query)) for item in items], 0
        return [np.concatenate((query, item)) for item in items], len(query)

    def _text_prompts(self, given: ScoreInput) -> tuple[list[Int32Array], int]:
        encoder = self._need_encoder("items")
        query = given.query or ""
        if given.item_first:
            return self._checked(encoder.prompts([f"{item}{query}" for item in given.items])), 0
        prompts = self._checked(encoder.prompts([f"{query}{item}" for item in given.items]))
        if len(prompts) > 1:
            return prompts, len(prompts[0])  # the common prefix alone decides
        return prompts, _common_prefix([prompts[0], encoder.prompts([str(query)])[0]])

    def _checked(self, prompts: list[Int32Array]) -> list[Int32Array]:
        """A tokenizer can know ids that the weights have no row for."""
        for index, ids in enumerate(prompts):
            if len(ids) and ids.max() >= self.backend.vocab_rows:
                self._ids(ids, f"items[{index}]")
        return prompts

    def _need_encoder(self, param: str) -> TextEncoder:
        if self.encoder is None:
            raise InvalidRequest("this model has no tokenizer: send token ids", param=param)
        return self.encoder

    def _check_lengths(self, prompts: Sequence[Int32Array]) -> None:
        for index, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise EmptyPrompt(
                    f"items[{index}] gives a prompt of 0 tokens", param=f"items[{index}]"
                )
            if len(prompt) > self.backend.max_model_len:
                raise PromptTooLong(
                    f"items[{index}] gives a prompt of {len(prompt)} tokens, "
                    f"the limit is {self.backend.max_model_len}",
                    param=f"items[{index}]",
                )

    def _check_size(self, request: ScoreRequest) -> None:
        _at_most(TooManyTokens, "items", request.num_tokens, self.limits.max_request_tokens)


def factor(
    prompts: Sequence[Int32Array], query_len: int
) -> tuple[Int32Array, tuple[Int32Array, ...]]:
    """Split prompts (each at least one token) at the cut, into one query and an item each."""
    cut = min(_common_prefix(prompts), min(map(len, prompts)) - 1)
    if len(prompts) == 1:
        cut = min(cut, query_len)
    return prompts[0][:cut], tuple(prompt[cut:] for prompt in prompts)


def _common_prefix(prompts: Sequence[Int32Array]) -> int:
    first, length = prompts[0], len(prompts[0])
    for prompt in prompts[1:]:
        length = min(length, len(prompt))
        differ = first[:length] != prompt[:length]
        if differ.any():
            length = int(differ.argmax())
    return length


def _is_text(given: ScoreInput) -> bool:
    """True for text, False for token ids; raises MixedInputTypes for both at once."""
    kinds = {isinstance(item, str) for item in given.items}
    if len(given.query):
        kinds.add(isinstance(given.query, str))
    if len(kinds) > 1:
        raise MixedInputTypes("query and items must be all text or all token ids", param="items")
    return kinds == {True}


def _label_count(count: int, limit: int, param: str) -> None:
    if count == 0:
        raise InvalidRequest(f"{param} must hold at least one label", param=param)
    _at_most(TooManyLabels, param, count, limit)


def _at_most(error: type[GpuscoreError], param: str, count: int, limit: int) -> None:
    if count > limit:
        what = {"TooManyTokens": "tokens", "TooManyItems": "items"}.get(error.__name__, "labels")
        raise error(f"{count} {what}, the limit is {limit}", param=param)
