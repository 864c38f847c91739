"""Calls of `decide` and `system_one`: from typed questions to a request, and to their answers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpuscore.config import RequestLimits
from gpuscore.errors import InvalidRequest
from gpuscore.offline.calls import Call
from gpuscore.prompts.decision_reads import ReadAnswer
from gpuscore.prompts.decision_texts import (
    DecisionQuestion,
    check_questions,
    choice,
    choice_question,
    json_text,
    level,
    most_options,
    noul_question,
    predicate,
    score_question,
)
from gpuscore.prompts.decisions import DecisionInput
from gpuscore.prompts.model import ModelPrompts
from gpuscore.types.call_arguments import checked_questions, named_questions
from gpuscore.types.questions import (
    Choice,
    Decision,
    Noul,
    Predicate,
    Question,
    Rating,
    TypedAnswer,
    TypedQuestion,
    levels_of,
)
from gpuscore.types.request import ScoreResult
from gpuscore.types.results import check_text


def decide_call(
    prompts: ModelPrompts, text: str, unchecked: Iterable[Question]
) -> Call[list[Decision]]:
    check_text(text, "text")
    questions = checked_questions(unchecked)
    if not questions:
        raise InvalidRequest("questions must hold at least one question", param="questions")
    limits = prompts.questions.limits
    asked = [_asked(question, limits, f"questions[{i}]") for i, question in enumerate(questions)]
    made = prompts.questions.build(DecisionInput(text, asked))

    def finish(result: ScoreResult | None) -> list[Decision]:
        assert result is not None  # noqa: S101  (there is a question)
        answers = made.reads.answers(result)
        return [_decision(*pair) for pair in zip(questions, answers, strict=True)]

    return Call(made.request, finish)


def system_one_call(
    prompts: ModelPrompts,
    state: Any,
    asked_of: Mapping[str, TypedQuestion],
    instructions: str | None,
) -> Call[dict[str, TypedAnswer]]:
    questions = named_questions(asked_of)
    if instructions is not None:
        check_text(instructions, "instructions")
    limits = prompts.questions.limits
    check_questions(len(questions), limits.max_questions)
    asked = [
        _typed(question, limits, f"questions[{number}]")
        for number, question in enumerate(questions.values())
    ]
    is_text = isinstance(state, str)
    told = state if is_text else _as_json(state)
    check_text(told, "state")
    inputs = DecisionInput(
        input=told,
        questions=asked,
        instructions=instructions,
        is_json=not is_text,
        need_top=True,
        input_name="state",
    )
    made = prompts.questions.build(inputs)

    def finish(result: ScoreResult | None) -> dict[str, TypedAnswer]:
        assert result is not None  # noqa: S101  (there is a question)
        pairs = zip(questions.items(), made.reads.answers(result), strict=True)
        return {name: _typed_answer(question, answer) for (name, question), answer in pairs}

    return Call(made.request, finish)


def _as_json(state: Any) -> str:
    try:
        return json_text(state)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"state is no value that JSON has: {error}", param="state") from error


def _asked(question: Question, limits: RequestLimits, param: str) -> DecisionQuestion:
    if isinstance(question, Predicate):
        return predicate(question.statement)
    if isinstance(question, Choice):
        most = most_options(limits.max_options)
        return choice(question.question, _options(question.choices, most, param))
    most = most_options(limits.max_levels)
    return level(question.question, _options(question.levels, most, param))


def _typed(question: TypedQuestion, limits: RequestLimits, param: str) -> DecisionQuestion:
    if isinstance(question, Noul):
        return noul_question(question.instructions, question.true, question.false, param)
    if isinstance(question, Choice):
        told = question.choices
        named = dict(told) if isinstance(told, Mapping) else dict.fromkeys(told)
        return choice_question(question.question, named, limits, param)
    return score_question(question.question, levels_of(question), limits, param)


def _options(
    choices: Sequence[str] | Mapping[str, str], most: int, param: str
) -> list[tuple[str, str]]:
    options = list(
        choices.items() if isinstance(choices, Mapping) else ((name, "") for name in choices)
    )
    if not 2 <= len(options) <= most or len({name for name, _ in options}) < len(options):
        raise InvalidRequest(
            f"{param} has {len(options)} answers; it needs 2 to {most} different ones", param=param
        )
    return options


def _decision(question: Question, read: ReadAnswer) -> Decision:
    levels = question.levels if isinstance(question, Rating) else ()
    answer, probabilities = _said(question, read, list(levels))
    return Decision(answer, max(probabilities.values()), probabilities, read.label_mass)


def _typed_answer(question: TypedQuestion, read: ReadAnswer) -> TypedAnswer:
    answer, probabilities = _said(question, read, [*map(str, range(len(read.shares)))])
    more = (read.confidence, read.label_mass, read.argmax_is_label)
    return TypedAnswer(answer, probabilities, *more)


def _said(
    question: Question | TypedQuestion, read: ReadAnswer, levels: Sequence[str]
) -> tuple[float | str, dict[str, float]]:
    """Return a question's answer, and its probabilities by name; levels have these names."""
    if isinstance(question, Choice):
        names = list(question.choices)
        return names[read.best], read.by_name(names)
    if isinstance(question, Rating):
        return read.mean, read.by_name(levels)
    return float(read.shares[0]), read.by_name(("yes", "no"))
