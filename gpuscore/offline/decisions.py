"""Calls of `decide`: from typed questions to a request, from its result to their answers."""

from collections.abc import Mapping, Sequence

from gpuscore.errors import InvalidRequest
from gpuscore.offline.calls import Call
from gpuscore.probabilities import label_mass, label_scores
from gpuscore.prompts.decisions import (
    MAX_CHOICES,
    MAX_LEVELS,
    DecisionQuestion,
    choice,
    level,
    predicate,
)
from gpuscore.prompts.model import ModelPrompts
from gpuscore.questions import Choice, Decision, Predicate, Question
from gpuscore.request import ScoreResult


def decide_call(
    prompts: ModelPrompts, text: str, questions: Sequence[Question]
) -> Call[list[Decision]]:
    if not questions:
        raise InvalidRequest("questions must hold at least one question", param="questions")
    asked = [_asked(question, f"questions[{i}]") for i, question in enumerate(questions)]
    request = prompts.questions.build(text, asked, 0)

    def finish(result: ScoreResult | None) -> list[Decision]:
        assert result is not None  # noqa: S101  (there is a question)
        rows = label_scores(result, apply_softmax=True)
        masses = label_mass(result, request).tolist()
        return [
            _decision(question, row.tolist(), mass)
            for question, row, mass in zip(questions, rows, masses, strict=True)
        ]

    return Call(request, finish)


def _asked(question: Question, param: str) -> DecisionQuestion:
    if isinstance(question, Predicate):
        return predicate(question.statement)
    if isinstance(question, Choice):
        return choice(question.question, _options(question.choices, MAX_CHOICES, param))
    return level(question.question, _options(question.levels, MAX_LEVELS, param))


def _options(
    given: Sequence[str] | Mapping[str, str], most: int, param: str
) -> list[tuple[str, str]]:
    options = list(given.items() if isinstance(given, Mapping) else ((name, "") for name in given))
    if not 2 <= len(options) <= most or len({name for name, _ in options}) < len(options):
        raise InvalidRequest(
            f"{param} has {len(options)} answers; it needs 2 to {most} different ones", param=param
        )
    return options


def _decision(question: Question, shares: list[float], mass: float) -> Decision:
    """Return a question's answer; `shares` are its labels' probabilities, which sum to 1."""
    confidence = max(shares)
    if isinstance(question, Predicate):
        named = dict(zip(("yes", "no"), shares, strict=True))
        return Decision(shares[0], confidence, named, mass)
    names = list(question.choices if isinstance(question, Choice) else question.levels)
    probabilities = dict(zip(names, shares, strict=True))
    if isinstance(question, Choice):
        return Decision(names[shares.index(confidence)], confidence, probabilities, mass)
    mean = sum(place * share for place, share in enumerate(shares))
    return Decision(mean, confidence, probabilities, mass)
