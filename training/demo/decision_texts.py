"""The text of typed questions, and the labels that answer them.

A question ends with the instruction to answer with one label. Options have a letter each, or two
letters if there are more than 26; levels have a number each while one digit is enough. System One's
contents are text, or objects and arrays, which the model reads as JSON.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_uppercase, digits
from typing import Any, TypeAlias

YES_NO = ("yes", "no")
PAIRS = tuple("".join(pair) for pair in product(ascii_uppercase, repeat=2))
SINGLE = (*YES_NO, *ascii_uppercase, *digits)  # labels of one character or word
WHICH = "Which of these fits best?"
APPLIES = "Which of these applies?"
OTHERWISE = "anything else"
Option = tuple[str, str]  # name and description


@dataclass(frozen=True, slots=True)
class DecisionQuestion:
    """A question as the model reads it.

    Args:
        text: ends with the instruction to answer with a label.
        labels: the possible answers.
        kind: its type.
        turned: the text with the options in reverse order, label by label; empty if the order is
            part of the question.
    """

    text: str
    labels: tuple[str, ...]
    kind: str = "noul"
    turned: str = ""


def predicate(statement: str) -> DecisionQuestion:
    text = f'Is this statement true?\n{statement}\nAnswer only "yes" or "no".'
    return DecisionQuestion(text, YES_NO)


def yes_or_no(instructions: str | None, true: str | None, false: str | None) -> DecisionQuestion:
    """Return a question or statement that is answered by yes or no.

    Args:
        instructions: the question; None if the descriptions say it all.
        true, false: descriptions of the answers yes and no; without instructions at least one.
    """
    told = [("yes", true), ("no", false)]
    if instructions is None:
        told = [(label, OTHERWISE if text is None else text) for label, text in told]
    lines = [f"{label}: {text}" for label, text in told if text is not None]
    head = APPLIES if instructions is None else instructions
    return DecisionQuestion("\n".join([head, *lines, 'Answer only "yes" or "no".']), YES_NO)


def choice(instructions: str | None, choices: Sequence[Option]) -> DecisionQuestion:
    """Return a question whose answer is one choice.

    Args:
        instructions: the question, if there is one beside the choices.
        choices: pairs of name and description, at most as many as PAIRS.
    """
    head = WHICH if instructions is None else instructions
    labels, what = _letters(len(choices))
    text, turned = (_listed(head, labels, order, what) for order in (choices, choices[::-1]))
    return DecisionQuestion(text, labels, "choice", turned)


def level(instructions: str | None, levels: Sequence[Option]) -> DecisionQuestion:
    """Return a question whose answer is one level.

    Args:
        instructions: the question, if there is one beside the levels.
        levels: pairs of name and description, from low to high, at most as many as PAIRS.
    """
    head = WHICH if instructions is None else instructions
    labels, what = _letters(len(levels))
    if len(levels) <= len(digits):
        labels, what = tuple(digits[: len(levels)]), "number"
    return DecisionQuestion(_listed(head, labels, levels, what), labels, "score")


def json_text(value: Any) -> str:
    """Return a JSON value as the model reads it: on one line, without spaces.

    Raises:
        TypeError, ValueError: JSON has no such value.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _letters(count: int) -> tuple[tuple[str, ...], str]:
    if count <= len(ascii_uppercase):
        return tuple(ascii_uppercase[:count]), "letter"
    return PAIRS[:count], "two letters"


def _listed(instructions: str, labels: Sequence[str], options: Sequence[Option], what: str) -> str:
    lines = [
        f"{label}. {name}" + (f": {description}" if description else "")
        for label, (name, description) in zip(labels, options, strict=True)
    ]
    return "\n".join([instructions, *lines, f"Answer only with the {what} of one of these."])


Content: TypeAlias = str | dict[str, Any] | list[Any]


def content_text(value: Content | None) -> str | None:
    return value if value is None or isinstance(value, str) else json_text(value)
