"""The text of typed questions, and the labels that answer them.

A question ends with the instruction to answer with one label. Options have a letter each, or two
letters if there are more than 26; levels have a number each while one digit is enough. System One's
contents are text, or objects and arrays, which the model reads as JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_uppercase, digits
from typing import Any, TypeAlias

from gpuscore.config import RequestLimits
from gpuscore.errors import InvalidRequest
from gpuscore.prompts.calibration import Kind

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
    kind: Kind = "noul"
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


def check_count(count: int, least: int, most: int, what: str, param: str) -> None:
    """Raise InvalidRequest unless there are `least` to `most` options of this kind."""
    if not least <= count <= most:
        raise InvalidRequest(
            f"{param} has {count} {what}; this server supports {least} to {most}",
            param=f"{param}.{what}",
        )


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


def noul_question(
    instructions: Content | None, true: Content | None, false: Content | None, param: str
) -> DecisionQuestion:
    """Return a question with the answers yes and no; `param` names it in errors."""
    if instructions is None and true is None and false is None:
        raise InvalidRequest(f"{param} has neither instructions nor criteria", param=param)
    return yes_or_no(*map(content_text, (instructions, true, false)))


def choice_question(
    instructions: Content | None,
    criteria: Mapping[str, Content | None],
    limits: RequestLimits,
    param: str,
) -> DecisionQuestion:
    """Return a question with one answer per name of the criteria."""
    check_count(len(criteria), 1, most_options(limits.max_options), "criteria", param)
    options = [(name, content_text(told) or "") for name, told in criteria.items()]
    return choice(content_text(instructions), options)


def score_question(
    instructions: Content | None, criteria: Sequence[Content], limits: RequestLimits, param: str
) -> DecisionQuestion:
    """Return a question with one answer per level, lowest first."""
    check_count(len(criteria), 1, most_options(limits.max_levels), "criteria", param)
    levels = [(content_text(criterion) or "", "") for criterion in criteria]
    return level(content_text(instructions), levels)


def most_options(limit: int) -> int:
    """Return a limit on options, which is at most the number of labels."""
    return min(limit, len(PAIRS))


def check_questions(count: int, most: int) -> None:
    """Raise InvalidRequest unless there is a question, and no more than `most`."""
    if not 1 <= count <= most:
        raise InvalidRequest(
            f"there are {count} questions; supported: 1 to {most}", param="questions"
        )
