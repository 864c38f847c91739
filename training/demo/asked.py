"""A typed question with its answer: as `/v1/systemone` takes it, and as the model reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from demo.decision_texts import (
    DecisionQuestion,
    Option,
    choice,
    level,
    yes_or_no,
)

RIGHT = 0.98  # the probability to train towards, as for "yes" in rankings
Marks: TypeAlias = Sequence[tuple[int, str, str]]  # ends of attributes, with slot and value


@dataclass(frozen=True)
class Mention:
    """A place in a question's text where an attribute has been named."""

    end: int
    slot: str
    value: str


@dataclass(frozen=True)
class Asked:
    """A question with its answer.

    Attributes:
        topic: what kind of question it is, for evaluation.
        body: the question as `/v1/systemone` takes it.
        question: the same as the model reads it.
        right: number of the right label, None if all are equally probable.
        mentions: attributes that the question names.
    """

    topic: str
    body: dict[str, Any]
    question: DecisionQuestion
    right: int | None
    mentions: tuple[Mention, ...] = ()

    @property
    def answer(self) -> bool | int | str:
        """The right answer, as `gpuscore calibrate` takes it; raises TypeError if none is."""
        if self.right is None:
            raise TypeError("no answer is right")
        if self.body["type"] == "noul":
            return self.right == 0
        names: list[str] = list(self.body["criteria"])
        return self.right if self.body["type"] == "score" else names[self.right]

    def targets(self) -> dict[str, float]:
        """Return the probability to train towards, for each label."""
        labels = self.question.labels
        if self.right is None:
            return dict.fromkeys(labels, 1 / len(labels))
        if len(labels) == 1:
            return {labels[0]: 1.0}
        rest = (1 - RIGHT) / (len(labels) - 1)
        return {label: RIGHT if i == self.right else rest for i, label in enumerate(labels)}


def noul(
    topic: str,
    right: bool | None,
    text: str | None,
    true: str | None = None,
    false: str | None = None,
) -> Asked:
    told = {key: value for key, value in (("true", true), ("false", false)) if value is not None}
    body = _body("noul", text, told)
    number = None if right is None else 0 if right else 1
    return Asked(topic, body, yes_or_no(text, true, false), number)


def choice_of(topic: str, right: int | None, text: str | None, options: Sequence[Option]) -> Asked:
    body = _body("choice", text, {name: told or None for name, told in options})
    return Asked(topic, body, choice(text, options), right)


def score_of(topic: str, right: int | None, text: str | None, levels: Sequence[Option]) -> Asked:
    body = _body("score", text, [name for name, _ in levels])
    return Asked(topic, body, level(text, levels), right)


def _body(kind: str, text: str | None, criteria: object) -> dict[str, Any]:
    body: dict[str, Any] = {"type": kind}
    if text is not None:
        body["instructions"] = text
    if criteria:
        body["criteria"] = criteria
    return body


def starts(asked: Asked) -> list[int]:
    """Return where each option's name begins in the question's text."""
    text, at, places = asked.question.text, 0, []
    for label, name in zip(asked.question.labels, asked.body["criteria"], strict=True):
        at = text.index(f"\n{label}. {name}", at) + len(f"\n{label}. ")
        places.append(at)
    return places


def listed(asked: Asked, slot: str, values: Sequence[str | None]) -> tuple[Mention, ...]:
    names = zip(starts(asked), asked.body["criteria"], values, strict=True)
    return tuple(
        Mention(at + len(name), slot, value) for at, name, value in names if value is not None
    )


def moved(marks: Marks, start: int) -> tuple[Mention, ...]:
    return tuple(Mention(start + end, slot, value) for end, slot, value in marks)
