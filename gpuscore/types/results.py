"""Results of `Scorer`'s methods, which the clients' results extend; their tables; and the errors of
single items, in requests whose other items are scored.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpuscore.errors import (
    EmptyPrompt,
    GpuscoreError,
    InvalidRequest,
    PromptTooLong,
    TokenIdOutOfRange,
)
from gpuscore.types.batch import BoolArray, Float32Array, Float64Array

ItemT = TypeVar("ItemT")
_ITEM = re.compile(r"(\w+)\[(\d+)\]")
# "fail": an item that cannot be scored fails its request; "null": it gets no score.
OnError: TypeAlias = Literal["fail", "null"]
ON_ERROR = ("fail", "null")
# Raised while the prompt of one item is made and checked; all others are of the whole request.
OF_ITEMS = (EmptyPrompt, InvalidRequest, PromptTooLong, TokenIdOutOfRange)


@dataclass(frozen=True, slots=True)
class ItemError:
    """An item that was not scored.

    Attributes:
        index: its place in the given list.
        code: the code of the error that the item alone would get, such as "prompt_too_long".
        message: that error's message, which names the item by its place.
    """

    index: int
    code: str
    message: str


class ItemErrors:
    """The errors of a request's items, found so far; at most one error for each item."""

    def __init__(self) -> None:
        self._errors: dict[int, GpuscoreError] = {}

    def __bool__(self) -> bool:
        return bool(self._errors)

    def __contains__(self, index: int) -> bool:
        return index in self._errors

    def add(self, index: int, error: GpuscoreError) -> None:
        """Keep the error of an item, unless it has one already.

        The error is copied, because the frames of a raised error would keep the request's texts.
        """
        self._errors.setdefault(index, type(error)(error.message, param=error.param))

    def rest(self, values: Sequence[ItemT]) -> list[ItemT]:
        """Return the values that belong to items without errors."""
        return [value for index, value in enumerate(values) if index not in self._errors]

    def listed(self) -> tuple[ItemError, ...]:
        """Return all errors by place."""
        return tuple(
            ItemError(index, error.code, error.message)
            for index, error in sorted(self._errors.items(), key=lambda pair: pair[0])
        )


class ItemsRefused(Exception):
    """Some items cannot be scored: the request is to be built again from the others."""


def check_on_error(on_error: str | None) -> bool:
    """Return True for "null", False for "fail" and None; raise InvalidRequest for anything else."""
    if on_error not in (None, *ON_ERROR):
        raise InvalidRequest('on_error must be "fail" or "null"', param="on_error")
    return on_error == "null"


def kind_of(value: object) -> str:
    """Return the type of a wrong value, for errors."""
    return "null" if value is None else f"of type {type(value).__name__}"


def check_text(value: object, param: str) -> None:
    """Raise InvalidRequest for a value that is no text, or that no tokenizer can read."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} is {kind_of(value)}; it must be a text", param=param)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param} holds a lone surrogate", param=param) from None


def checked_texts(values: Sequence[object], name: str, errors: ItemErrors | None) -> list[str]:
    """Return texts, with an empty one in the place of each value that cannot be read as text.

    Args:
        values: the caller's values.
        name: the caller's name for them.
        errors: gets the errors; None: the first one is raised.

    Raises:
        InvalidRequest: a value cannot be read, and there is no `errors`.
    """
    texts: list[str] = []
    for index, value in enumerate(values):
        try:
            check_text(value, f"{name}[{index}]")
            texts.append(value)  # type: ignore[arg-type]  # it is a text
        except InvalidRequest as error:
            if errors is None:
                raise
            errors.add(index, error)
            texts.append("")
    return texts


def spread(
    rows: Iterable[ItemT], errors: Sequence[ItemError], count: int
) -> Iterator[ItemT | None]:
    """Yield a row for each of `count` items, None for those with errors; `rows` has the others."""
    left_out, remaining = {error.index for error in errors}, iter(rows)
    for index in range(count):
        yield None if index in left_out else next(remaining)


def scored_places(errors: Sequence[ItemError] | None, count: int | None) -> Sequence[int]:
    """Return the places of the items without errors, of `count` items."""
    left_out = {error.index for error in errors or ()}
    places = range(count or 0)
    return [index for index in places if index not in left_out] if left_out else places


def renumbered(error: GpuscoreError, places: Sequence[int]) -> GpuscoreError:
    """Return an error of a request's part that names the item by its place in the whole request.

    Args:
        error: may name an item, as in `items[3]`.
        places: of the part's items.
    """
    match = _ITEM.fullmatch(error.param or "")
    if error.param is None or match is None or int(match[2]) >= len(places):
        return error
    param = f"{match[1]}[{places[int(match[2])]}]"
    message = error.message.replace(error.param, param)
    return type(error)(message, param=param, retry_after=error.retry_after)


Document: TypeAlias = str | Mapping[str, Any]


class TokenCounts(TypedDict):
    """The numbers of tokens that every result has."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Results of `Scorer.score`, float64: rows belong to items, columns to labels.

    If items have different numbers of labels, `scores`, `logprobs` and `logits` are padded with NaN
    on the right. With `on_error="null"` the row of an item in `errors` is NaN.

    Attributes:
        scores: [N, labels], probabilities.
        logprobs: [N, labels], over the full vocabulary or all classes; None unless asked for.
        label_mass: [N], the probability of all labels of an item together; None unless `logprobs`
            was asked for.
        prompt_tokens: tokens of all prompts, each counted as a whole.
        cached_tokens: prompt tokens that were not computed again.
        logits: [N, labels], as the model's head gives them; None unless asked for.
        labels: names of the columns: the labels' texts, or their ids; empty if items have labels of
            their own.
        errors: the items that were not scored; their tokens are not counted.
    """

    scores: Float64Array  # [N, labels]
    logprobs: Float64Array | None  # [N, labels]
    label_mass: Float64Array | None  # [N]
    prompt_tokens: int
    cached_tokens: int
    logits: Float64Array | None = None  # [N, labels]
    labels: tuple[str, ...] = ()
    errors: tuple[ItemError, ...] = ()


@dataclass(frozen=True, slots=True)
class Ranking:
    """A ranking of documents, best first; documents with equal scores keep the given order.

    With `on_error="null"` it leaves out the documents in `errors`, which have no rank.

    Attributes:
        indices: [n], each document's place in the given list.
        scores: [n], float64: relevance from 0 to 1, or raw scores if they were asked for.
        truncated: [n], True if the document was cut, as the call allowed.
        documents: [n], the given documents.
        prompt_tokens: tokens of all prompts, each counted as a whole.
        cached_tokens: prompt tokens that were not computed again.
        errors: the documents that were not scored.
    """

    indices: NDArray[np.int64]  # [n]
    scores: Float64Array  # [n]
    truncated: BoolArray  # [n]
    documents: tuple[Document, ...]  # [n]
    prompt_tokens: int
    cached_tokens: int
    errors: tuple[ItemError, ...] = ()


@dataclass(frozen=True, slots=True)
class PairScores:
    """Scores of pairs, in the given order.

    Attributes:
        scores: [N], float64: relevance from 0 to 1, or raw scores if they were asked for; NaN for a
            pair in `errors`.
        truncated: [N], True if the document was cut, as the call allowed.
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens that were not computed again.
        errors: with `on_error="null"`: the pairs that were not scored.
    """

    scores: Float64Array  # [N]
    truncated: BoolArray  # [N]
    prompt_tokens: int
    cached_tokens: int
    errors: tuple[ItemError, ...] = ()


@dataclass(frozen=True, slots=True)
class Classification:
    """Classes of texts, in the given order.

    Attributes:
        classes: names of the columns.
        probabilities: [N, classes], float64.
        best: [N], the most probable class of each text.
        truncated: [N], True if the text was cut, as the call allowed.
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens that were not computed again.
    """

    classes: tuple[str, ...]
    probabilities: Float64Array  # [N, classes]
    best: tuple[str, ...]  # [N]
    truncated: BoolArray  # [N]
    prompt_tokens: int
    cached_tokens: int


def rectangle(
    rows: Sequence[Sequence[float] | Float64Array | Float32Array | None], width: int
) -> Float64Array:
    """Return rows as float64 [N, most]; NaN fills the ends of shorter rows, and empty rows.

    Args:
        rows: of any lengths.
        width: number of columns if there is no row with numbers.
    """
    most = max((len(row) for row in rows if row is not None), default=width if rows else 0)
    table = np.full((len(rows), most), np.nan)
    for target, row in zip(table, rows, strict=True):
        if row is not None:
            target[: len(row)] = row
    return table


def column(values: Float64Array | None, errors: Sequence[ItemError], count: int) -> Float64Array:
    """Return float64 [count]: the values in their order, and NaN in the places of errors."""
    spread_out = spread([] if values is None else values.tolist(), errors, count)
    return np.array([np.nan if value is None else value for value in spread_out], dtype=np.float64)
