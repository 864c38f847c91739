"""Errors of single items, in requests whose other items are scored all the same."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from gpuscore.errors import (
    EmptyPrompt,
    GpuscoreError,
    InvalidRequest,
    PromptTooLong,
    TokenIdOutOfRange,
)

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
        code: the code of the error that it would be alone, such as "prompt_too_long".
        message: that error's message, which names the item by its place.
    """

    index: int
    code: str
    message: str


class ItemErrors:
    """The errors of a request's items, found so far; at most one of each item."""

    def __init__(self) -> None:
        self._found: dict[int, GpuscoreError] = {}

    def copy(self) -> "ItemErrors":
        made = ItemErrors()
        made._found.update(self._found)
        return made

    def raise_first(self) -> None:
        """Raise the error of the first item that has one."""
        if self._found:
            raise self._found[min(self._found)]

    def __bool__(self) -> bool:
        return bool(self._found)

    def __contains__(self, index: int) -> bool:
        return index in self._found

    def add(self, index: int, error: GpuscoreError) -> None:
        """Keep the error of an item, unless it has one already.

        It is copied, because the frames of one that was raised would keep the request's texts.
        """
        self._found.setdefault(index, type(error)(error.message, param=error.param))

    def rest(self, given: Sequence[ItemT]) -> list[ItemT]:
        """Return the items, or what belongs to them, that have no error."""
        return [one for index, one in enumerate(given) if index not in self._found]

    def listed(self) -> tuple[ItemError, ...]:
        """Return all errors by place."""
        return tuple(
            ItemError(index, error.code, error.message)
            for index, error in sorted(self._found.items(), key=lambda pair: pair[0])
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


def checked_texts(given: Sequence[object], name: str, errors: ItemErrors | None) -> list[str]:
    """Return texts, with an empty one in the place of each value that cannot be read as text.

    Args:
        given: the caller's values.
        name: the caller's name for them.
        errors: gets the errors; None: the first one is raised.

    Raises:
        InvalidRequest: a value cannot be read, and there is no `errors`.
    """
    texts: list[str] = []
    for index, value in enumerate(given):
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
    """Return an error about an item of a part of a request with the item's place in the whole.

    Args:
        error: may name an item, as in `items[3]`.
        places: of the part's items.
    """
    found = _ITEM.fullmatch(error.param or "")
    if error.param is None or found is None or int(found[2]) >= len(places):
        return error
    param = f"{found[1]}[{places[int(found[2])]}]"
    message = error.message.replace(error.param, param)
    return type(error)(message, param=param, retry_after=error.retry_after)
