"""Calls of `decide` and `system_one`, which ask typed questions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from gpuscore.client.calls import Answered, ClientCall, Common, list_call
from gpuscore.client.options import Body, RequestOptions, SplitLimits, as_json, fields_of
from gpuscore.config import RequestLimits
from gpuscore.dialects.answers import (
    MAX_QUESTIONS,
    ChoiceAnswer,
    DecisionsAnswer,
    LevelAnswer,
    NamedChoiceAnswer,
    NoulAnswer,
    PredicateAnswer,
    ScoreLevelAnswer,
    SystemOneAnswer,
)
from gpuscore.errors import InvalidRequest
from gpuscore.types.call_arguments import checked_options, checked_questions, named_questions
from gpuscore.types.questions import (
    Choice,
    Decision,
    Noul,
    Predicate,
    Question,
    TypedAnswer,
    TypedQuestion,
    levels_of,
)
from gpuscore.types.results import check_text

_Decided: TypeAlias = PredicateAnswer | ChoiceAnswer | LevelAnswer
_Typed: TypeAlias = NoulAnswer | NamedChoiceAnswer | ScoreLevelAnswer
_Value: TypeAlias = tuple[float | str, dict[str, float]]


def decide_call(
    limits: SplitLimits, text: str, asked_of: Iterable[Question], unchecked: RequestOptions
) -> ClientCall[list[Decision]]:
    options = checked_options(RequestOptions, unchecked)
    check_text(text, "text")
    questions = checked_questions(asked_of)
    most = replace(limits, max_items=min(limits.max_items, MAX_QUESTIONS))
    asked = {"questions": [as_json(_question(question)) for question in questions]}

    def join(answered: Sequence[Answered[DecisionsAnswer]], common: Common) -> list[Decision]:
        made: list[Decision] = []
        for part in answered:
            answers = part.answer.answers
            part.check(len(answers) == part.count, f"{len(answers)} answers")
            values = _read(part, questions[part.start : part.stop], answers)
            for answer, (value, shares) in zip(answers, values, strict=True):
                if isinstance(answer, PredicateAnswer):
                    confidence = max(shares.values())
                else:
                    confidence = answer.confidence
                made.append(Decision(value, confidence, shares, answer.label_mass))
        return made

    body = Body({"input": text} | fields_of(RequestOptions, options), asked)
    return list_call("/v1/decisions", body, DecisionsAnswer, options, most, join)


def system_one_call(
    limits: SplitLimits,
    state: Any,
    asked_of: Mapping[str, TypedQuestion],
    instructions: str | None,
    unchecked: RequestOptions,
) -> ClientCall[dict[str, TypedAnswer]]:
    options = checked_options(RequestOptions, unchecked)
    questions = named_questions(asked_of)
    shared = {"state": state} | fields_of(RequestOptions, options)
    if instructions is not None:
        check_text(instructions, "instructions")
        shared["instructions"] = instructions
    try:
        as_json(state)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"state is no value that JSON has: {error}", param="state") from error
    most = replace(limits, max_items=min(limits.max_items, RequestLimits().max_questions))
    names = list(questions)
    pairs = [
        as_json(name) + b":" + as_json(_typed_question(question))
        for name, question in questions.items()
    ]

    def join(
        answered: Sequence[Answered[SystemOneAnswer]], common: Common
    ) -> dict[str, TypedAnswer]:
        made: dict[str, TypedAnswer] = {}
        for part in answered:
            asked = names[part.start : part.stop]
            answers, known = part.answer.answers, part.answer.diagnostics
            part.check(list(answers) == asked and set(known) == set(asked), "other answers")
            values = _read(part, [questions[name] for name in asked], answers.values())
            for (name, answer), (value, shares) in zip(answers.items(), values, strict=True):
                told = known[name]
                more = (answer.confidence, told.label_mass, told.argmax_is_label)
                made[name] = TypedAnswer(value, shares, *more)
        return made

    body = Body(shared, {"questions": pairs}, is_object=True)
    return list_call("/v1/systemone", body, SystemOneAnswer, options, most, join)


def _question(question: Question) -> dict[str, Any]:
    if isinstance(question, Predicate):
        return {"type": "predicate", "instructions": question.statement}
    if isinstance(question, Choice):
        choices = _options(question.choices, "value")
        return {"type": "choice", "instructions": question.question, "choices": choices}
    levels = _options(question.levels, "label")
    return {"type": "score", "instructions": question.question, "levels": levels}


def _options(choices: Sequence[str] | Mapping[str, str], name: str) -> list[dict[str, str]]:
    if isinstance(choices, Mapping):
        return [
            {name: choice, "description": description} for choice, description in choices.items()
        ]
    return [{name: choice} for choice in choices]


def _typed_question(question: TypedQuestion) -> dict[str, Any]:
    if isinstance(question, Noul):
        described = {"true": question.true, "false": question.false}
        criteria = {name: text for name, text in described.items() if text is not None}
        told = {"instructions": question.instructions, "criteria": criteria or None}
        return {"type": "noul"} | {name: value for name, value in told.items() if value is not None}
    if isinstance(question, Choice):
        choices = question.choices
        named = dict(choices) if isinstance(choices, Mapping) else dict.fromkeys(choices)
        return {"type": "choice", "instructions": question.question, "criteria": named}
    return {"type": "score", "instructions": question.question, "criteria": levels_of(question)}


def _read(
    part: Answered[Any],
    questions: Iterable[Question | TypedQuestion],
    answers: Iterable[_Decided | _Typed],
) -> list[_Value]:
    """Return answers' values and probabilities; raise BadAnswer if an answer fits no question."""
    pairs = list(zip(questions, answers, strict=True))
    values = [_value(answer) for _, answer in pairs]
    right = all(_fits(*pair, *value) for pair, value in zip(pairs, values, strict=True))
    part.check(right, "answers of other types or with other options")
    return values


def _value(answer: _Decided | _Typed) -> _Value:
    """Return an answer's value, and its probabilities by name"""
    if isinstance(answer, PredicateAnswer | NoulAnswer):
        yes = answer.probability if isinstance(answer, PredicateAnswer) else answer.noul
        return yes, {"yes": yes, "no": 1 - yes}
    value = answer.score if isinstance(answer, LevelAnswer | ScoreLevelAnswer) else answer.choice
    if isinstance(answer, ChoiceAnswer):
        return value, {str(entry.value): entry.probability for entry in answer.probabilities}
    if isinstance(answer, LevelAnswer):
        return value, {entry.label: entry.probability for entry in answer.probabilities}
    return value, answer.probabilities


def _fits(
    question: Question | TypedQuestion,
    answer: _Decided | _Typed,
    value: float | str,
    shares: Mapping[str, float],
) -> bool:
    """Return True if the answer fits this question and has a probability of each option."""
    if isinstance(answer, PredicateAnswer | NoulAnswer):
        return isinstance(question, Predicate | Noul)
    if isinstance(question, Predicate | Noul):
        return False
    if isinstance(question, Choice):
        right = isinstance(answer, ChoiceAnswer | NamedChoiceAnswer) and value in shares
        names = list(question.choices)
    else:
        right = isinstance(answer, LevelAnswer | ScoreLevelAnswer)
        names = list(question.levels)
    if isinstance(answer, ScoreLevelAnswer):
        names = [str(number) for number in range(len(names))]
    return right and set(shares) == set(names) and len(answer.probabilities) == len(names)
