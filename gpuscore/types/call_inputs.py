"""Reading what callers of `Scorer` and of the clients give as lists, texts and token ids.

A text is a `str`. Token ids are a sequence of integers or a 1-d NumPy array of them. A list is
anything that can be iterated in an order; it is read once. Everything else is refused by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np

from gpuscore.errors import InvalidRequest
from gpuscore.types.item_errors import check_text, checked_texts, kind_of
from gpuscore.types.questions import Choice, Noul, Predicate, Question, Rating, TypedQuestion

_BYTES = (bytes, bytearray, memoryview)  # sequences of integers, but hardly ever meant as ids
_OPTIONS = {Choice: "choices", Rating: "levels"}
_TEXTS = {Predicate: ("statement",), Noul: ("instructions", "true", "false")}


def check_list(given: object, name: str) -> None:
    """Raise InvalidRequest for what is no list: one text, bytes, or something without an order."""
    if isinstance(given, str):  # would be taken for a sequence of texts of one character
        raise InvalidRequest(f"{name} must be a list, not one text", param=name)
    wrong = isinstance(given, (*_BYTES, Mapping, set, frozenset)) or not isinstance(given, Iterable)
    # Iterating over a table gives the names of its columns; an array [] cannot be iterated.
    if wrong or hasattr(given, "columns") or getattr(given, "ndim", 1) == 0:
        raise InvalidRequest(f"{name} is {kind_of(given)}; it must be a list", param=name)


def listed(given: Any, name: str) -> list[Any]:
    """Return a caller's list, which may be an iterator; raise InvalidRequest if it is no list."""
    check_list(given, name)
    return list(given)


def texts(given: Any, name: str) -> list[str]:
    """Return a list of texts; raise InvalidRequest, with the place, for anything else."""
    return checked_texts(listed(given, name), name, None)


def token_ids(given: Any, param: str) -> list[int]:
    """Return token ids as plain integers; raise InvalidRequest, with the place, for others."""
    if not _is_sequence(given):
        raise InvalidRequest(f"{param} is {kind_of(given)}; it must be token ids", param=param)
    values = given
    if isinstance(given, np.ndarray):
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iuO"):
            shown = f"{given.dtype} {list(given.shape)}"
            raise InvalidRequest(
                f"{param} is an array of {shown}; it must be of integers [n]", param=param
            )
        values = given.tolist()
    if set(map(type, values)) <= {int}:
        return list(values)
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise InvalidRequest(
                f"{param}[{place}] is {kind_of(value)}; it must be an integer", param=param
            )
    return [int(value) for value in values]


def text_or_ids(given: Any, param: str) -> str | list[int]:
    """Return a text as it is, or token ids as plain integers; raise InvalidRequest for the rest."""
    if _is_sequence(given):
        return token_ids(given, param)
    if not isinstance(given, str):
        what = f"{param} is {kind_of(given)}; it must be a text or token ids"
        raise InvalidRequest(what, param=param)
    check_text(given, param)
    return given


def lists_of_ids(given: Any, name: str) -> list[list[int]]:
    """Return lists of token ids; raise InvalidRequest, with the place, for anything else."""
    return [token_ids(ids, f"{name}[{index}]") for index, ids in enumerate(listed(given, name))]


def ids_or_lists(given: Any, name: str) -> list[int] | list[list[int]]:
    """Return token ids, or lists of them if the first element is one."""
    elements = listed(given, name)
    if elements and _is_sequence(elements[0]):
        return lists_of_ids(elements, name)
    return token_ids(elements, name)


def pairs_of(given: Any) -> list[tuple[Any, Any]]:
    """Return the pairs of `score_pairs`; raise InvalidRequest unless they are pairs."""
    found = enumerate(listed(given, "pairs"))
    return [pair(one, f"pairs[{index}]", "a query and a document") for index, one in found]


def pair(given: Any, param: str, what: str) -> tuple[Any, Any]:
    """Return the two values of a pair; raise InvalidRequest, which says `what` it must be."""
    if not _is_sequence(given) or len(given) != 2:
        raise InvalidRequest(f"{param} must be {what}", param=param)
    return given[0], given[1]


def _is_sequence(given: object) -> TypeGuard[Any]:
    return isinstance(given, Sequence | np.ndarray) and not isinstance(given, (str, *_BYTES))


def checked_questions(given: Any) -> list[Question]:
    """Return the questions of `decide`, with their options read once.

    Raises:
        InvalidRequest: they are no list, one is of another type, or holds something else than text.
    """
    found = listed(given, "questions")
    return [_checked(one, (Predicate, Choice, Rating), index) for index, one in enumerate(found)]


def named_questions(given: Any) -> dict[str, TypedQuestion]:
    """Return the questions of `system_one` as `checked_questions` does."""
    if not isinstance(given, Mapping):
        what = "it must be a mapping of names to questions"
        raise InvalidRequest(f"questions is {kind_of(given)}; {what}", param="questions")
    names = texts(given.keys(), "questions")
    found = (_checked(one, (Noul, Choice, Rating), i) for i, one in enumerate(given.values()))
    return dict(zip(names, found, strict=True))


def _checked(given: Any, kinds: tuple[type, ...], index: int) -> Any:
    param = f"questions[{index}]"
    if not isinstance(given, kinds):
        wanted = ", ".join(kind.__name__ for kind in kinds)
        what = f"{param} is {kind_of(given)}; it must be one of {wanted}"
        raise InvalidRequest(what, param=param)
    for name in _TEXTS.get(type(given), ("question",)):
        value = getattr(given, name)
        if value is not None or not isinstance(given, Noul):
            check_text(value, f"{param}.{name}")
    if (name := _OPTIONS.get(type(given), "")) == "":
        return given
    return replace(given, **{name: _options(getattr(given, name), f"{param}.{name}")})


def _options(given: Any, param: str) -> list[str] | dict[str, str]:
    """Return options by name, of which each may have a description, or a list of their names."""
    if not isinstance(given, Mapping):
        return texts(given, param)
    told = ("" if one is None else one for one in given.values())
    return dict(zip(texts(given.keys(), param), texts(told, param), strict=True))
