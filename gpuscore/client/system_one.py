"""Calls of `system_one`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from gpuscore.client.calls import Answer as ListAnswer
from gpuscore.client.calls import Answered, ClientCall, Common, Details, ListCall, Usage
from gpuscore.client.options import RequestOptions, given
from gpuscore.client.split import Body, SplitLimits, as_json
from gpuscore.config import RequestLimits
from gpuscore.errors import InvalidRequest
from gpuscore.types.call_inputs import named_questions
from gpuscore.types.item_errors import check_text
from gpuscore.types.questions import (
    Choice,
    Noul,
    Rating,
    TypedAnswer,
    TypedQuestion,
    levels_of,
)

MAX_QUESTIONS = RequestLimits().max_questions


class _Usage(Usage):
    prompt_tokens: int = msgspec.field(name="input_tokens")
    prompt_tokens_details: Details = msgspec.field(
        name="input_tokens_details", default_factory=Details
    )


class _Noul(msgspec.Struct, tag="noul"):
    noul: float
    confidence: float


class _Choice(msgspec.Struct, tag="choice"):
    choice: str
    probabilities: dict[str, float]
    confidence: float


class _Score(msgspec.Struct, tag="score"):
    score: float
    probabilities: dict[str, float]
    confidence: float


class _Diagnostics(msgspec.Struct):
    label_mass: float
    argmax_is_label: bool | None = None


class _SystemOne(ListAnswer):
    usage: _Usage
    answers: dict[str, _Noul | _Choice | _Score]
    diagnostics: dict[str, _Diagnostics]


def system_one_call(
    limits: SplitLimits,
    state: Any,
    asked_of: Mapping[str, TypedQuestion],
    instructions: str | None,
    more: RequestOptions,
) -> ClientCall[dict[str, TypedAnswer]]:
    questions = named_questions(asked_of)
    if instructions is not None:
        check_text(instructions, "instructions")
    try:
        as_json(state)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"state is no value that JSON has: {error}", param="state") from error
    most = replace(limits, max_items=min(limits.max_items, MAX_QUESTIONS))
    names = list(questions)
    pairs = [
        as_json(name) + b":" + as_json(_question(question)) for name, question in questions.items()
    ]
    shared = {"state": state} | given(instructions=instructions) | more.fields

    def join(found: Sequence[Answered[_SystemOne]], common: Common) -> dict[str, TypedAnswer]:
        made: dict[str, TypedAnswer] = {}
        for one in found:
            asked = names[one.start : one.stop]
            answers, known = one.answer.answers, one.answer.diagnostics
            one.check(list(answers) == asked and set(known) == set(asked), "other answers")
            right = all(_fits(questions[name], answers[name]) for name in asked)
            one.check(right, "answers of other types or with other options")
            made |= {name: _answer(answers[name], known[name]) for name in asked}
        return made

    body = Body(shared, {"questions": pairs}, is_object=True)
    return ListCall("/v1/systemone", body, _SystemOne, more).call(most, join)


def _question(question: TypedQuestion) -> dict[str, Any]:
    if isinstance(question, Noul):
        criteria = given(true=question.true, false=question.false)
        told = given(instructions=question.instructions, criteria=criteria or None)
        return {"type": "noul"} | told
    if isinstance(question, Choice):
        choices = question.choices
        named = dict(choices) if isinstance(choices, Mapping) else dict.fromkeys(choices)
        return {"type": "choice", "instructions": question.question, "criteria": named}
    assert isinstance(question, Rating)  # noqa: S101  (there is no fourth)
    criteria_list = levels_of(question)
    return {"type": "score", "instructions": question.question, "criteria": criteria_list}


def _fits(question: TypedQuestion, answer: _Noul | _Choice | _Score) -> bool:
    """Return True if the answer is one to this question."""
    if isinstance(question, Noul):
        return isinstance(answer, _Noul)
    if isinstance(question, Choice):
        names = set(question.choices)
        right = isinstance(answer, _Choice) and answer.choice in names
        return right and set(answer.probabilities) == names  # type: ignore[union-attr]
    levels = set(map(str, range(len(question.levels))))
    return isinstance(answer, _Score) and set(answer.probabilities) == levels


def _answer(answer: _Noul | _Choice | _Score, told: _Diagnostics) -> TypedAnswer:
    more = (answer.confidence, told.label_mass, told.argmax_is_label)
    if isinstance(answer, _Noul):
        shares = {"yes": answer.noul, "no": 1 - answer.noul}
        return TypedAnswer(answer.noul, shares, *more)
    value = answer.choice if isinstance(answer, _Choice) else answer.score
    return TypedAnswer(value, answer.probabilities, *more)
