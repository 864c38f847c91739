"""Errors of single items in requests whose other items are scored, and checks of an item's text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from gpuscore.errors import (
    EmptyPrompt,
    GpuscoreError,
    InvalidRequest,
    NoExtractionToken,
    PromptTooLong,
    TokenIdOutOfRange,
)

ItemT = TypeVar("ItemT")
_ITEM = re.compile(r"(\w+)\[(\d+)\]")
# "fail": an item that cannot be scored fails its request; "null": it gets no score.
OnError: TypeAlias = Literal["fail", "null"]
# These errors may concern one item, when its prompt is built. All others fail the whole request.
ITEM_ERRORS = (EmptyPrompt, InvalidRequest, NoExtractionToken, PromptTooLong, TokenIdOutOfRange)


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
    """Some items cannot be scored. The caller must build the request again without them."""


def check_on_error(on_error: str | None) -> bool:
    """Return True for "null", False for "fail" and None; raise InvalidRequest for anything else."""
    if on_error not in (None, "fail", "null"):
        raise InvalidRequest('on_error must be "fail" or "null"', param="on_error")
    return on_error == "null"


def kind_of(value: object) -> str:
    """Return the type of a wrong value, as an error's text says it."""
    return "null" if value is None else f"of type {type(value).__name__}"


def check_text(value: object, param: str) -> None:
    """Raise InvalidRequest for a value that is not a text, or that no tokenizer can read."""
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
            texts.append(value)  # type: ignore[arg-type]  # `check_text` passed
        except InvalidRequest as error:
            if errors is None:
                raise
            errors.add(index, error)
            texts.append("")
    return texts


def renumbered(error: GpuscoreError, places: Sequence[int]) -> GpuscoreError:
    """Return an error whose item is named by its index in the whole request.

    Args:
        error: an error of one part of the request; it may name an item, as in `items[3]`.
        places: the indices in the whole request of that part's items.
    """
    match = _ITEM.fullmatch(error.param or "")
    if error.param is None or match is None or int(match[2]) >= len(places):
        return error
    param = f"{match[1]}[{places[int(match[2])]}]"
    message = error.message.replace(error.param, param)
    return type(error)(message, param=param, retry_after=error.retry_after)
