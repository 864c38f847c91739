"""A caller's query, items and labels, and the checks of their values for one model.

Labels are texts, token ids, sequences of token ids, or names of a classification model's classes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from gpuscore.config import RequestLimits
from gpuscore.errors import (
    EmptyLabels,
    EmptyPrompt,
    InvalidRequest,
    MissingLabels,
    MixedInputTypes,
    NoExtractionToken,
    PromptTooLong,
    TokenIdOutOfRange,
    TooManyLabels,
    TooManyTokens,
)
from gpuscore.text.boundaries import COPIES_PER_TOKEN, OverLimit, announce
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import NO_TOKENS, BackendLimits, Int32Array
from gpuscore.types.item_errors import (
    ITEM_ERRORS,
    ItemErrors,
    ItemsRefused,
    check_text,
    checked_texts,
)
from gpuscore.types.request import LabelTrie, Terms


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """A caller's request whose fields fit together; the classes below check their values.

    `query` and `items` are both text or both token ids; an empty query may be either. A request
    without `label_token_ids`, `labels` and `label_sequences` gets the model's default labels.

    Attributes:
        is_text: True if there is any text; False for token ids, and if everything is empty.

    Raises:
        MixedInputTypes, EmptyLabels, InvalidRequest: on creation, if fields contradict each other.
    """

    query: str | list[int]
    items: Sequence[str | list[int]]
    label_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None
    labels: Sequence[str] | None = None
    label_sequences: Sequence[Sequence[int]] | None = None
    item_first: bool = False
    need_lse: bool = True
    terms: Terms = Terms()
    extraction: str | int | None = None  # items are scored after each occurrence of this token
    is_text: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_text", _is_text(self))
        _check_label_fields(self)

    def check_labels(self, default: Sequence[int] | None) -> None:
        """Raise MissingLabels if the request has no labels, and the model no default ones."""
        sources = (self.labels, self.label_token_ids, self.label_sequences, default)
        if all(labels is None for labels in sources):
            raise MissingLabels("label_token_ids or labels is required", param="label_token_ids")

    def checked(self, errors: ItemErrors) -> "ScoreInput":
        """Return the input, in which items that cannot be read are empty and get errors.

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
        raise InvalidRequest(f"send only one of {' and '.join(named)}", param=named[0])
    if inputs.labels is not None:
        _check_not_empty(inputs.labels, "labels")
        return
    if inputs.label_sequences is not None:
        _check_not_empty(inputs.label_sequences, "label_sequences")
        if len(lists := lists_of(inputs.label_sequences)) < len(inputs.label_sequences):
            raise InvalidRequest(
                "label_sequences must be lists of integers, one per label", param="label_sequences"
            )
        for index, ids in enumerate(lists):
            _check_not_empty(ids, f"label_sequences[{index}]", "token id")
    if inputs.label_token_ids is None:
        return
    _check_not_empty(inputs.label_token_ids, "label_token_ids")
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
        _check_not_empty(ids, f"label_token_ids[{index}]")


def lists_of(labels: Sequence[int] | Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Return the label lists, one per item; [] if one flat list holds for all items."""
    return [x for x in labels if not isinstance(x, int | np.integer)]


def _check_not_empty(labels: Sequence[object], param: str, what: str = "label") -> None:
    if not len(labels):
        raise EmptyLabels(f"{param} must hold at least one {what}", param=param)


PromptsFrom = Callable[[int], Iterator[Int32Array]]  # yields the prompts from this index on
FEW_IDS = 16  # up to this many ids are checked one by one


class PromptChecks:
    """The checks of one model's prompts and ids.

    Args:
        backend: the model's limits.
        after: tokens of labels for which the context must have room after each prompt.
        token: id of a token that every prompt must hold.
    """

    def __init__(self, backend: BackendLimits, after: int = 0, token: int | None = None) -> None:
        self.backend = backend
        self.token = token
        self.limit = max(0, backend.max_model_len - after)  # tokens of a prompt
        labels = f", less {after} for the labels" if after else ""
        self._limit_text = f"the limit is {backend.max_model_len}{labels}"

    def checked(
        self,
        prompts: PromptsFrom,
        name: str = "items",
        errors: ItemErrors | None = None,
    ) -> Iterator[Int32Array]:
        """Yield the prompts; raise an error for a bad length or an id that the model does not have.

        With `errors`, a prompt's error is added there instead. The prompts after it are checked but
        not yielded, and ItemsRefused is raised at the end.
        """
        source = prompts(0)
        for index in count():
            prompt = None
            try:
                with self.limit_errors(f"{name}[{index}]"):
                    prompt = next(source, None)
                if prompt is None:
                    break
                announce(len(prompt) // COPIES_PER_TOKEN)  # the work of copying it
                if errors is None or index not in errors:
                    self._check_prompt(prompt, index, name)
            except ITEM_ERRORS as error:
                if errors is None:
                    raise
                errors.add(index, error)
                if prompt is None:
                    source = prompts(index + 1)  # a generator that raised cannot go on
            if prompt is not None and not errors:
                yield prompt
        if errors:
            raise ItemsRefused

    def _check_prompt(self, prompt: Int32Array, index: int, name: str) -> None:
        self.check_length(len(prompt), index, name)
        # A tokenizer can have more ids than the model.
        if prompt.max() >= self.backend.vocab_rows:
            self.ids(prompt, f"{name}[{index}]")
        if self.token is not None and not (prompt == self.token).any():
            param = f"{name}[{index}]"
            raise NoExtractionToken(
                f"{param} does not hold the extraction token, {self.token}", param=param
            )

    def check_length(self, length: int, index: int, name: str = "items") -> None:
        param = f"{name}[{index}]"
        if length == 0:
            raise EmptyPrompt(f"{param} gives a prompt of 0 tokens", param=param)
        if length > self.limit:
            raise PromptTooLong(
                f"{param} gives a prompt of {length} tokens, {self._limit_text}", param=param
            )

    @contextmanager
    def limit_errors(self, param: str) -> Iterator[None]:
        """Turn OverLimit, raised inside, into PromptTooLong."""
        try:
            yield
        except OverLimit as over:
            raise PromptTooLong(
                f"{param} gives a prompt of at least {over.least} tokens, {self._limit_text}",
                param=param,
            ) from None

    def ids(self, values: Sequence[int] | Int32Array, param: str) -> Int32Array:
        """Return valid token ids as int32 [n]; raise an error that names an invalid one."""
        return self._ids(values, param, self.backend.vocab_rows, "token id")

    def label_ids(self, values: Sequence[int] | Int32Array, param: str) -> Int32Array:
        """Return valid labels as int32 [n]; raise an error that names an invalid one."""
        what = "token id" if self.backend.classes is None else "class"
        return self._ids(values, param, self.backend.label_rows, what)

    def _ids(
        self, values: Sequence[int] | Int32Array, param: str, rows: int, what: str
    ) -> Int32Array:
        """Return ids as int32 [n] if 0 <= id < rows for each; errors call an id `what`."""
        if 0 < len(values) <= FEW_IDS and all(type(id) is int and 0 <= id < rows for id in values):
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


Labels = tuple[Int32Array, ...]  # the label ids of every item


@dataclass(frozen=True, slots=True)
class LabelReader:
    """Reads the labels of requests for one model; `encoder` is None if it has no tokenizer."""

    encoder: TextEncoder | None
    checks: PromptChecks
    limits: RequestLimits

    def read(
        self, inputs: ScoreInput, default: Sequence[int] | None
    ) -> tuple[Labels, LabelTrie | None]:
        """Return the label ids of every item, and the trie if a label has several tokens.

        Raises:
            GpuscoreError: one of its subclasses, if a label is not valid.
        """
        inputs.check_labels(default)
        count = len(inputs.items)
        classes = self.checks.backend.classes
        ids = inputs.label_token_ids if inputs.label_token_ids is not None else default or ()
        sequences = None
        if inputs.labels is not None:
            self._check_count(len(inputs.labels), "labels")
            if classes is None:
                sequences = self._tokenised(inputs.labels)
            else:
                ids = class_ids(inputs.labels, classes)
        elif inputs.label_sequences is not None:
            sequences = self._sequences(inputs.label_sequences)
        if sequences is not None:
            trie = LabelTrie.of(sequences)
            return (trie.first_ids,) * count, trie if trie.num_nodes else None
        if lists := lists_of(ids):
            return self._per_item(lists), None
        return self.same_for_all(list(ids), count), None  # type: ignore[arg-type]

    def same_for_all(self, ids: Sequence[int], num_items: int) -> Labels:
        """Return the same labels for each of the items."""
        return (self._one_list(ids, "label_token_ids"),) * num_items

    def _per_item(self, lists: Sequence[Sequence[int]]) -> Labels:
        arrays: list[Int32Array] = []
        for index, ids in enumerate(lists):
            announce(len(ids))  # an id is about as much work as a character
            arrays.append(self._one_list(ids, f"label_token_ids[{index}]"))
        return tuple(arrays)

    def _one_list(self, ids: Sequence[int], param: str) -> Int32Array:
        self._check_count(len(ids), param)
        return self.checks.label_ids(ids, param)

    def _tokenised(self, labels: Sequence[str]) -> list[Int32Array]:
        limit = self.limits.max_label_tokens
        sequences: list[Int32Array] = []
        try:
            for tokens in need_encoder(self.encoder, "labels").prompts(labels, False, limit):
                param = f"labels[{len(sequences)}]"
                if not len(tokens):
                    raise EmptyLabels(f"{param} is 0 tokens, it must be at least one", param=param)
                self._check_length(len(tokens), param)
                sequences.append(self.checks.label_ids(tokens, param))
        except OverLimit as over:
            param = f"labels[{len(sequences)}]"
            raise TooManyTokens(
                f"{param} is at least {over.least} tokens, the limit is {limit}", param=param
            ) from None
        return sequences

    def _sequences(self, sequences: Sequence[Sequence[int]]) -> list[Int32Array]:
        self._check_count(len(sequences), "label_sequences")
        arrays: list[Int32Array] = []
        for index, ids in enumerate(sequences):
            param = f"label_sequences[{index}]"
            if len(ids) > 1 and self.checks.backend.classes is not None:
                raise InvalidRequest(
                    f"{param} has {len(ids)} numbers; this model's labels are classes, of one "
                    f"number each",
                    param=param,
                )
            self._check_length(len(ids), param)
            arrays.append(self.checks.label_ids(ids, param))
        return arrays

    def _check_count(self, count: int, param: str) -> None:
        if count > self.limits.max_labels:
            raise TooManyLabels(
                f"{count} labels, the limit is {self.limits.max_labels}", param=param
            )

    def _check_length(self, length: int, param: str) -> None:
        if length > self.limits.max_label_tokens:
            raise TooManyTokens(
                f"{param} is {length} tokens, the limit is {self.limits.max_label_tokens}",
                param=param,
            )


def need_encoder(encoder: TextEncoder | None, param: str) -> TextEncoder:
    """Return the tokenizer; raise InvalidRequest, naming this field, if there is none."""
    if encoder is None:
        raise InvalidRequest("this model has no tokenizer: send token ids", param=param)
    return encoder


def class_ids(labels: Sequence[str], classes: Sequence[str]) -> list[int]:
    """Return the number of the class that has each label as its exact name.

    Raises:
        InvalidRequest: no class, or more than one, has a label as its name.
    """
    for index, label in enumerate(labels):
        count = classes.count(label)
        if count != 1:
            named = count or "none"
            remedy = "; send label_token_ids, the numbers of classes" if count else ""
            raise InvalidRequest(
                f"labels[{index}] names {named} of the model's {len(classes)} classes{remedy}",
                param=f"labels[{index}]",
            )
    return [classes.index(label) for label in labels]
