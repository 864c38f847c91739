"""Checks of single prompts and ids against the model that is to read them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import numpy as np

from gpuscore.errors import EmptyPrompt, InvalidRequest, PromptTooLong, TokenIdOutOfRange
from gpuscore.text.pieces import OverLimit
from gpuscore.text.turns import COPIED, Turns
from gpuscore.types.arrays import NO_TOKENS, Int32Array
from gpuscore.types.item_errors import OF_ITEMS, ItemErrors, ItemsRefused
from gpuscore.types.limits import BackendLimits

PromptsFrom = Callable[[int], Iterator[Int32Array]]  # the prompts from this number on
FEW = 16  # up to this many ids are checked one by one


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
        turns: Turns,
        name: str = "items",
        errors: ItemErrors | None = None,
    ) -> Iterator[Int32Array]:
        """Yield the prompts; raise an error for a bad length or an id that the model lacks.

        With `errors`, the error of a prompt is kept there, and the rest is only checked; at the end
        ItemsRefused is raised if there are any.
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
            turns.before(len(prompt) // COPIED)  # for the copies that are made of it
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
            if prompt.max() >= self.backend.vocab_rows:  # a tokenizer can have more ids than that
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
