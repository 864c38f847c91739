"""Typed questions about one text, and their answers, for `decide` and `system_one`."""

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
        choices: 2 to 255 different names; a mapping also has a description of each.
    """

    question: str
    choices: Sequence[str] | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Rating:
    """A question that is answered by a level on a scale.

    Args:
        question: its text.
        levels: 2 to 26 names, lowest first; a mapping also has a description of each.
    """

    question: str
    levels: Sequence[str] | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Noul:
    """A question or statement that is answered by yes or no.

    Args:
        instructions: its text; not needed if an answer is described.
        true: description of the answer yes.
        false: description of the answer no.
    """

    instructions: str | None = None
    true: str | None = None
    false: str | None = None


Question: TypeAlias = Predicate | Choice | Rating
TypedQuestion: TypeAlias = Noul | Choice | Rating


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


@dataclass(frozen=True, slots=True)
class TypedAnswer:
    """The answer to a question of `system_one`.

    Attributes:
        answer: for a Noul the probability of yes; for a Choice the most probable name; for a Rating
            the mean level, where the lowest counts as 0.
        probabilities: of "yes" and "no", of each name, or of each level by its number; they sum to
            1.
        confidence: the most probable answer's probability over the whole vocabulary.
        label_mass: the probability of all answers together, over the whole vocabulary.
        argmax_is_label: True if the model's most probable continuation is one of the answers.
    """

    answer: float | str
    probabilities: dict[str, float]
    confidence: float
    label_mass: float
    argmax_is_label: bool | None


def levels_of(rating: Rating) -> list[str]:
    """Return the levels as System One has them: each with its description, if it has one."""
    if isinstance(rating.levels, Mapping):
        return [f"{name}: {told}" if told else name for name, told in rating.levels.items()]
    return list(rating.levels)
