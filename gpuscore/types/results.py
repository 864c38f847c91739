"""Results of a request's items: probabilities of labels, or the errors of single items in requests
whose other items are scored."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gpuscore.errors import (
    EmptyPrompt,
    GpuscoreError,
    InvalidRequest,
    NoExtractionToken,
    PromptTooLong,
    TokenIdOutOfRange,
)
from gpuscore.types.batch import Float32Array, Float64Array, Int32Array
from gpuscore.types.request import LabelTrie, ScoreRequest, ScoreResult

ItemT = TypeVar("ItemT")
ArrayT = TypeVar("ArrayT", Int32Array, Float32Array)
_ITEM = re.compile(r"(\w+)\[(\d+)\]")
# "fail": an item that cannot be scored fails its request; "null": it gets no score.
OnError: TypeAlias = Literal["fail", "null"]
ON_ERROR = ("fail", "null")
# Raised while the prompt of one item is made and checked; all others are of the whole request.
OF_ITEMS = (EmptyPrompt, InvalidRequest, NoExtractionToken, PromptTooLong, TokenIdOutOfRange)


@dataclass(frozen=True, slots=True)
class ItemError:
    """An item that was not scored.

    Attributes:
        index: its place in the given list.
        code: the code of the error that the item alone would get, such as "prompt_too_long".
        message: the error's message, which names the item by its place.
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
    left_out = {error.index for error in errors}
    remaining = iter(rows)
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
        places: the places of the part's items in the whole request.
    """
    match = _ITEM.fullmatch(error.param or "")
    if error.param is None or match is None or int(match[2]) >= len(places):
        return error
    param = f"{match[1]}[{places[int(match[2])]}]"
    message = error.message.replace(error.param, param)
    return type(error)(message, param=param, retry_after=error.retry_after)


def by_row(result: ScoreResult, request: ScoreRequest) -> ScoreResult:
    """Return the result of items with several rows each as if each row were an item."""
    return replace(result, label_logits=rows_apart(result.label_logits, request))


def rows_apart(arrays: tuple[ArrayT, ...], request: ScoreRequest) -> tuple[ArrayT, ...]:
    """Return the parts of each item's array that belong to its rows, which have equally many
    labels."""
    if request.readouts is None:
        return arrays
    pairs = zip(arrays, request.readouts.places[1:], strict=True)
    return tuple(row for array, places in pairs for row in array.reshape(len(places), -1))


def per_token(result: ScoreResult, trie: LabelTrie | None) -> ScoreResult:
    """Return the result with each label's sum divided by the label's number of tokens."""
    if trie is None:
        return result
    assert result.lse is not None  # noqa: S101  (requests with a trie need it)
    lse = result.lse[:, None].astype(np.float64)
    means = (np.stack(result.label_logits) - lse) / trie.lengths + lse
    return replace(result, label_logits=tuple(means.astype(np.float32)))


def check_temperature(temperature: float, apply_softmax: bool) -> None:
    """Refuse a temperature that is not positive and finite, or that is not 1 without softmax.

    Raises:
        InvalidRequest: the temperature is refused.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise InvalidRequest("temperature must be positive and finite", param="temperature")
    if temperature != 1.0 and not apply_softmax:
        raise InvalidRequest("temperature needs apply_softmax", param="temperature")


def label_scores(
    result: ScoreResult, *, apply_softmax: bool, temperature: float = 1.0
) -> list[Float64Array]:
    """Return one row of scores per item, with one column per label.

    Without softmax a score is the label's probability over the whole vocabulary, exp(logit - lse).
    With softmax it is softmax(logits / temperature) over the item's labels; a row then sums to 1.
    """
    if apply_softmax:
        return _by_rows(result.label_logits, lambda rows, _: softmax(rows, temperature))
    return [np.exp(row) for row in label_logprobs(result)]


def label_logprobs(result: ScoreResult) -> list[Float64Array]:
    """Return full-vocabulary log-probabilities, natural log; the request needs `need_lse`."""
    lse = result.lse
    if lse is None:
        raise ValueError("the request did not ask for the log-sum-exp")
    # Rounding can put a logit a hair above the log-sum-exp; no probability exceeds 1.
    return _by_rows(
        result.label_logits,
        lambda rows, numbers: np.minimum(rows - lse[numbers, None], 0.0),
    )


def _by_rows(
    label_logits: tuple[Float32Array, ...], compute: Callable[[Float64Array, slice], Float64Array]
) -> list[Float64Array]:
    """Call `compute` with float64 logits [rows, labels] and the slice of rows they belong to.

    One call if all items have the same number of labels, otherwise one per item.
    """
    count = len(label_logits)
    if len({len(row) for row in label_logits}) == 1:
        together = np.concatenate(label_logits, dtype=np.float64).reshape(count, -1)
        return list(compute(together, slice(0, count)))
    return [
        compute(row[None].astype(np.float64), slice(i, i + 1))[0]
        for i, row in enumerate(label_logits)
    ]


def label_mass(
    result: ScoreResult, request: ScoreRequest, labels: Sequence[Int32Array] | None = None
) -> Float64Array:
    """Return per row the probability of all its labels together, at most 1.

    Equal labels count once. A label that continues another one does not count, because the other
    one's probability contains it.

    Args:
        result: the result of some of the request's rows.
        labels: these rows' labels; None: those of all items.
    """
    columns: list[NDArray[Any]] = []
    if request.trie is None:
        labels = request.label_ids if labels is None else labels
        columns = [np.unique(ids, return_index=True)[1] for ids in labels]
    else:
        columns = [request.trie.counted] * len(result.label_logits)
    rows = zip(label_logprobs(result), columns, strict=True)
    masses = [np.exp(row[counted]).sum() for row, counted in rows]
    return np.minimum(np.array(masses, dtype=np.float64), 1.0)


def softmax(rows: Float64Array, temperature: float = 1.0) -> Float64Array:
    """Return the softmax of rows [N, labels] along the labels."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -inf
        weights = np.exp((rows - rows.max(axis=1, keepdims=True)) / temperature)
    normed: Float64Array = weights / weights.sum(axis=1, keepdims=True)
    return normed
