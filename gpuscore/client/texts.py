"""Calls of `classify`, `decide` and `completions`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from gpuscore.client.calls import (
    Answer,
    Answered,
    ClientCall,
    Common,
    Details,
    ListCall,
    Usage,
)
from gpuscore.client.options import RequestOptions, given
from gpuscore.client.results import ClassifyResponse, Completion, CompletionsResponse
from gpuscore.client.split import Body, SplitLimits, as_json
from gpuscore.types.call_inputs import checked_questions, listed, text_or_ids, token_ids
from gpuscore.types.call_inputs import texts as texts_of
from gpuscore.types.call_options import Ids, Labels
from gpuscore.types.item_errors import check_text
from gpuscore.types.questions import Choice, Decision, Predicate, Question

MAX_QUESTIONS = 400  # of one request, on the server


class _Class(msgspec.Struct):
    label: str
    probs: list[float]
    truncated: bool = False


class _Classes(Answer):
    labels: list[str]
    data: list[_Class]


class _InputUsage(Usage):
    prompt_tokens: int = msgspec.field(name="input_tokens")
    prompt_tokens_details: Details = msgspec.field(
        name="input_tokens_details", default_factory=Details
    )


class _Share(msgspec.Struct):
    probability: float


class _Predicate(msgspec.Struct, tag="predicate"):
    probability: float
    label_mass: float


class _Choice(msgspec.Struct, tag="choice"):
    confidence: float
    probabilities: list[_Share]
    choice: str
    label_mass: float


class _Level(msgspec.Struct, tag="score"):
    confidence: float
    probabilities: list[_Share]
    score: float
    label_mass: float


class _Decisions(Answer):
    usage: _InputUsage
    answers: list[_Predicate | _Choice | _Level]


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _CompletedPrompt(msgspec.Struct):
    text: str
    logprobs: _Logprobs | None = None


class _Completions(Answer):
    choices: list[_CompletedPrompt]


def classify_call(
    limits: SplitLimits,
    texts: str | Iterable[str],
    query: str | None,
    labels: Labels,
    max_tokens_per_doc: int | None,
    truncate: bool,
    more: RequestOptions,
) -> ClientCall[ClassifyResponse]:
    if query is not None:
        check_text(query, "query")
    shared = given(
        query=query,
        labels=None if labels is None else texts_of(labels, "labels"),
        max_tokens_per_doc=max_tokens_per_doc,
        truncate=truncate or None,
    )
    elements = texts_of([texts] if isinstance(texts, str) else texts, "texts")
    body = Body(shared | more.fields, {"input": [as_json(text) for text in elements]})

    def join(found: Sequence[Answered[_Classes]], common: Common) -> ClassifyResponse:
        classes = shared.get("labels", found[0].answer.labels)
        for one in found:
            told = one.answer
            one.check_table([text.probs for text in told.data], [len(classes)] * one.count)
            right = told.labels == classes and all(text.label in classes for text in told.data)
            one.check(right, f"{len(told.labels)} other classes than the {len(classes)} asked for")
        data = [text for one in found for text in one.answer.data]
        return ClassifyResponse(
            classes=tuple(found[0].answer.labels),
            probabilities=np.array([text.probs for text in data], dtype=np.float64),
            best=tuple(text.label for text in data),
            truncated=np.array([text.truncated for text in data], dtype=np.bool_),
            **common.of_result,
        )

    return ListCall("/v1/classify", body, _Classes, more).call(limits, join)


def decide_call(
    limits: SplitLimits, text: str, asked_of: Iterable[Question], more: RequestOptions
) -> ClientCall[list[Decision]]:
    check_text(text, "text")
    questions = checked_questions(asked_of)
    most = replace(limits, max_items=min(limits.max_items, MAX_QUESTIONS))
    asked = {"questions": [as_json(_question(question)) for question in questions]}

    def join(found: Sequence[Answered[_Decisions]], common: Common) -> list[Decision]:
        for one in found:
            given = one.answer.answers
            one.check(len(given) == one.count, f"{len(given)} answers")
            right = all(map(_fits, questions[one.start : one.stop], given))
            one.check(right, "answers of other types or with other options")
        answers = [answer for one in found for answer in one.answer.answers]
        return [_decision(*pair) for pair in zip(questions, answers, strict=True)]

    body = Body({"input": text} | more.fields, asked)
    return ListCall("/v1/decisions", body, _Decisions, more).call(most, join)


def completions_call(
    limits: SplitLimits,
    prompts: str | Ids | Iterable[str] | Iterable[Ids],
    *,
    max_tokens: int,
    echo: bool,
    logprobs: int | None,
    add_special_tokens: bool,
    more: RequestOptions,
) -> ClientCall[CompletionsResponse]:
    shared = {"max_tokens": max_tokens, "echo": echo} | given(
        logprobs=logprobs, add_special_tokens=add_special_tokens
    )
    elements = {"prompt": [as_json(prompt) for prompt in _prompts(prompts)]}

    def join(found: Sequence[Answered[_Completions]], common: Common) -> CompletionsResponse:
        for one in found:
            one.check(len(one.answer.choices) == one.count, f"{len(one.answer.choices)} choices")
            right = all(_is_whole(choice, logprobs) for choice in one.answer.choices)
            one.check(right, "lists of tokens and log-probabilities of different lengths")
        choices = [choice for one in found for choice in one.answer.choices]
        return CompletionsResponse(tuple(map(_completion, choices)), **common.of_result)

    body = Body(shared | more.fields, elements)
    return ListCall("/v1/completions", body, _Completions, more).call(limits, join)


def _prompts(given: str | Ids | Iterable[str] | Iterable[Ids]) -> list[str | list[int]]:
    """Return the prompts as a list, also if there is one text or one list of token ids."""
    if isinstance(given, str):
        return [text_or_ids(given, "prompts")]
    elements = listed(given, "prompts")
    if elements and isinstance(elements[0], int | np.integer):
        return [token_ids(elements, "prompts")]
    return [text_or_ids(one, f"prompts[{index}]") for index, one in enumerate(elements)]


def _question(question: Question) -> dict[str, Any]:
    if isinstance(question, Predicate):
        return {"type": "predicate", "instructions": question.statement}
    if isinstance(question, Choice):
        choices = _options(question.choices, "value")
        return {"type": "choice", "instructions": question.question, "choices": choices}
    levels = _options(question.levels, "label")
    return {"type": "score", "instructions": question.question, "levels": levels}


def _options(given: Sequence[str] | Mapping[str, str], name: str) -> list[dict[str, str]]:
    if isinstance(given, Mapping):
        return [{name: one, "description": description} for one, description in given.items()]
    return [{name: one} for one in given]


def _fits(question: Question, answer: _Predicate | _Choice | _Level) -> bool:
    """Return True if the answer is one to this question."""
    if isinstance(question, Predicate):
        return isinstance(answer, _Predicate)
    if isinstance(question, Choice):
        names = list(question.choices)
        right = isinstance(answer, _Choice) and answer.choice in names
        return right and len(answer.probabilities) == len(names)  # type: ignore[union-attr]
    return isinstance(answer, _Level) and len(answer.probabilities) == len(question.levels)


def _decision(question: Question, answer: _Predicate | _Choice | _Level) -> Decision:
    if isinstance(answer, _Predicate):
        yes = answer.probability
        named = {"yes": yes, "no": 1 - yes}
        return Decision(yes, max(named.values()), named, answer.label_mass)
    names: Sequence[str] = ()
    if not isinstance(question, Predicate):
        names = list(question.choices if isinstance(question, Choice) else question.levels)
    named = dict(zip(names, (one.probability for one in answer.probabilities), strict=True))
    value = answer.choice if isinstance(answer, _Choice) else answer.score
    return Decision(value, answer.confidence, named, answer.label_mass)


def _is_whole(choice: _CompletedPrompt, asked: int | None) -> bool:
    """Return True if each token has a log-probability, and with `asked` over 0 the best ones."""
    found = choice.logprobs
    if found is None:
        return asked is None
    best = found.top_logprobs
    lengths = {len(found.tokens), len(found.token_logprobs)}
    return len(lengths | ({len(best)} if best is not None else set())) == 1 and (
        best is not None or not asked
    )


def _completion(choice: _CompletedPrompt) -> Completion:
    found = choice.logprobs or _Logprobs([], [])
    values = [np.nan if value is None else value for value in found.token_logprobs]
    best = found.top_logprobs or [None] * len(values)
    numbers = np.array(values, dtype=np.float64)
    return Completion(choice.text, tuple(found.tokens), numbers, tuple(best))
