"""Checks of single prompts, ids and labels against the model that is to read them.

Labels are texts, token ids, sequences of them, or the names of a classification model's classes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import numpy as np

from gpuscore.config import RequestLimits
from gpuscore.errors import (
    EmptyLabels,
    EmptyPrompt,
    InvalidRequest,
    PromptTooLong,
    TokenIdOutOfRange,
    TooManyLabels,
    TooManyTokens,
)
from gpuscore.text.boundaries import COPIED, OverLimit, announce
from gpuscore.text.score_input import ScoreInput, lists_of
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import NO_TOKENS, BackendLimits, Int32Array
from gpuscore.types.request import LabelTrie
from gpuscore.types.results import OF_ITEMS, ItemErrors, ItemsRefused

PromptsFrom = Callable[[int], Iterator[Int32Array]]  # the prompts from this number on
FEW = 16  # up to this many ids are checked one by one


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


class PromptChecks:
    """The checks of one model's prompts and ids.

    Args:
        backend: the model's limits.
        after: tokens of a label that must fit the context after a prompt.
    """

    def __init__(self, backend: BackendLimits, after: int = 0) -> None:
        self.backend = backend
        self.limit = max(0, backend.max_model_len - after)  # tokens of a prompt
        labels = f", less {after} for the labels" if after else ""
        self._limit_text = f"the limit is {backend.max_model_len}{labels}"

    def checked(
        self,
        prompts: PromptsFrom,
        name: str = "items",
        errors: ItemErrors | None = None,
    ) -> Iterator[Int32Array]:
        """Yield the prompts; raise an error for a bad length or an id that the model lacks.

        With `errors`, the error of a prompt is kept there, and the prompts after it are only
        checked; at the end ItemsRefused is raised if there are errors.
        """
        source = prompts(0)
        for index in count():
            try:
                with self.too_long(f"{name}[{index}]"):
                    prompt = next(source, None)
            except OF_ITEMS as error:
                if errors is None:
                    raise
                errors.add(index, error)
                source = prompts(index + 1)  # a generator that has raised is at its end
                continue
            if prompt is None:
                break
            announce(len(prompt) // COPIED)  # for the copies that are made of it
            if errors is None or index not in errors:
                self._check_prompt(prompt, index, name, errors)
            if not errors:
                yield prompt
        if errors:
            raise ItemsRefused

    def _check_prompt(
        self, prompt: Int32Array, index: int, name: str, errors: ItemErrors | None
    ) -> None:
        try:
            self.check_length(len(prompt), index, name)
            if prompt.max() >= self.backend.vocab_rows:  # a tokenizer can have more ids
                self.ids(prompt, f"{name}[{index}]")
        except OF_ITEMS as error:
            if errors is None:
                raise
            errors.add(index, error)

    def check_length(self, length: int, index: int, name: str = "items") -> None:
        param = f"{name}[{index}]"
        if length == 0:
            raise EmptyPrompt(f"{param} gives a prompt of 0 tokens", param=param)
        if length > self.limit:
            raise PromptTooLong(
                f"{param} gives a prompt of {length} tokens, {self._limit_text}", param=param
            )

    @contextmanager
    def too_long(self, param: str) -> Iterator[None]:
        """Raise OverLimit as PromptTooLong."""
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
        """Return ids as int32 [n], all with 0 <= id < rows; `what` names them in errors."""
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


Labels = tuple[Int32Array, ...]  # the label ids of every item


@dataclass(frozen=True, slots=True)
class LabelReader:
    """The reader of labels for one model; `encoder` is None if it has no tokenizer."""

    encoder: TextEncoder | None
    checks: PromptChecks
    limits: RequestLimits

    def read(
        self, inputs: ScoreInput, default: Sequence[int] | None
    ) -> tuple[Labels, LabelTrie | None]:
        """Return the label ids of every item, and the trie if a label has several tokens.

        Raises:
            GpuscoreError: the subclass that names the error in the labels.
        """
        inputs.check_labels(default)
        if inputs.labels is not None:
            self._check_count(len(inputs.labels), "labels")
        if inputs.label_sequences is not None:
            return self._trie(self._sequences(inputs.label_sequences), len(inputs.items))
        classes = self.checks.backend.classes
        if inputs.labels is not None and classes is not None:
            return self.same(class_ids(inputs.labels, classes), len(inputs.items)), None
        if inputs.labels is not None:
            return self._trie(self._tokenised(inputs.labels), len(inputs.items))
        ids = inputs.label_token_ids if inputs.label_token_ids is not None else default or ()
        if lists := lists_of(ids):
            return self._of_items(lists), None
        return self.same(list(ids), len(inputs.items)), None  # type: ignore[arg-type]

    def same(self, ids: Sequence[int], num_items: int) -> Labels:
        return (self.array(ids, "label_token_ids"),) * num_items

    def _of_items(self, lists: Sequence[Sequence[int]]) -> Labels:
        arrays: list[Int32Array] = []
        for index, ids in enumerate(lists):
            announce(len(ids))  # an id takes about as long as a character
            arrays.append(self.array(ids, f"label_token_ids[{index}]"))
        return tuple(arrays)

    def array(self, ids: Sequence[int], param: str) -> Int32Array:
        self._check_count(len(ids), param)
        return self.checks.label_ids(ids, param)

    def _trie(
        self, sequences: Sequence[Int32Array], num_items: int
    ) -> tuple[Labels, LabelTrie | None]:
        trie = LabelTrie.of(sequences)
        return (trie.first_ids,) * num_items, trie if trie.num_nodes else None

    def _tokenised(self, labels: Sequence[str]) -> list[Int32Array]:
        most, sequences = self.limits.max_label_tokens, list[Int32Array]()
        try:
            for tokens in need_encoder(self.encoder, "labels").prompts(labels, False, most):
                param = f"labels[{len(sequences)}]"
                if not len(tokens):
                    raise EmptyLabels(f"{param} is 0 tokens, it must be at least one", param=param)
                self._check_length(len(tokens), param)
                sequences.append(self.checks.label_ids(tokens, param))
        except OverLimit as over:
            param = f"labels[{len(sequences)}]"
            raise TooManyTokens(
                f"{param} is at least {over.least} tokens, the limit is {most}", param=param
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
    """Return the number of the class that each label names exactly.

    Raises:
        InvalidRequest: a label is the name of no class, or of several.
    """
    for index, label in enumerate(labels):
        count = classes.count(label)
        if count != 1:
            named = f"{count} of" if count else "none of"
            remedy = "; send label_token_ids, the numbers of classes" if count else ""
            raise InvalidRequest(
                f"labels[{index}] is the name of {named} the model's {len(classes)} "
                f"classes{remedy}",
                param=f"labels[{index}]",
            )
    return [classes.index(label) for label in labels]
