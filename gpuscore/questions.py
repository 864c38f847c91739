"""Typed questions about one text, and their answers, for `Scorer.decide` and the clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Predicate:
    """A statement that is true or false of the text.

    Args:
        statement: its text.
    """

    statement: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A question with one of several answers.

    Args:
        question: its text.
        choices: 2 to 26 different names; a mapping also has a description of each.
    """

    question: str
    choices: Sequence[str] | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Rating:
    """A question that is answered by a level on a scale.

    Args:
        question: its text.
        levels: 2 to 10 names, lowest first; a mapping also has a description of each.
    """

    question: str
    levels: Sequence[str] | Mapping[str, str]


Question: TypeAlias = Predicate | Choice | Rating


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to a question.

    Attributes:
        answer: for a predicate the probability that it is true; for a choice the most probable one;
            for a level the mean level, where the lowest counts as 0.
        confidence: the largest of the probabilities.
        probabilities: of each choice or level, or of "yes" and "no"; they sum to 1.
        label_mass: the probability of all labels together; near 0 means that the model would have
            said something else.
    """

    answer: float | str
    confidence: float
    probabilities: dict[str, float]
    label_mass: float
