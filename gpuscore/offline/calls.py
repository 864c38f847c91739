"""Calls of `Scorer` and `AsyncScorer`: from arguments to a request, from its result to theirs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from gpuscore.arrays import BoolArray, Float32Array, Float64Array
from gpuscore.errors import InvalidRequest
from gpuscore.offline.results import Classification, PairScores, Ranking, Scores
from gpuscore.probabilities import check_temperature, label_logprobs, label_mass, label_scores
from gpuscore.prompts.classes import Classes, ClassifyInput, build_classes
from gpuscore.prompts.decisions import (
    MAX_CHOICES,
    MAX_LEVELS,
    DecisionQuestion,
    choice,
    level,
    predicate,
)
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.model import ModelPrompts
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.questions import Choice, Decision, Predicate, Question
from gpuscore.request import ScoreRequest, ScoreResult
from gpuscore.text.score_input import ScoreInput

ValueT = TypeVar("ValueT")
Text = str | Sequence[int]
Items = str | Sequence[str] | Sequence[Sequence[int]]
Labels = Sequence[str] | None
LabelIds = Sequence[int] | Sequence[Sequence[int]] | None


@dataclass(frozen=True, slots=True)
class Call(Generic[ValueT]):
    """A request for the engine, and the function that makes the caller's value of its result."""

    request: ScoreRequest
    finish: Callable[[ScoreResult], ValueT]


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The options of `Scorer.score` besides query and items."""

    labels: Labels = None
    label_token_ids: LabelIds = None
    apply_softmax: bool = False
    temperature: float = 1.0
    item_first: bool = False
    logprobs: bool = False
    logits: bool = False


def score_call(
    prompts: ModelPrompts, query: Text, items: Items, options: CallOptions
) -> Call[Scores] | Scores:
    """Return the call, or its result if there are no items."""
    check_temperature(options.temperature, options.apply_softmax)
    _no_single_text(options.labels, "labels")
    given = ScoreInput(
        query=query if isinstance(query, str) else list(query),
        items=_items(items),
        labels=options.labels,
        label_token_ids=options.label_token_ids,
        item_first=options.item_first,
        need_lse=options.logprobs or not options.apply_softmax,
    )
    request = prompts.builder.build(given)
    if request is None:
        return Scores(np.empty((0, 0)), None, None, 0, 0)

    def finish(result: ScoreResult) -> Scores:
        rows = label_scores(
            result, apply_softmax=options.apply_softmax, temperature=options.temperature
        )
        return Scores(
            scores=_rectangle(rows),
            logprobs=_rectangle(label_logprobs(result)) if options.logprobs else None,
            label_mass=label_mass(result, request.label_ids) if options.logprobs else None,
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=_cached(request, result),
            logits=_rectangle(result.label_logits) if options.logits else None,
            labels=_names(options),
        )

    return Call(request, finish)


def rerank_call(
    prompts: ModelPrompts,
    query: str,
    documents: Sequence[str],
    *,
    top_n: int | None,
    instruction: str | None,
    raw_scores: bool,
    max_tokens_per_doc: int | None,
    truncate: bool,
) -> Call[Ranking]:
    _no_single_text(documents, "documents")
    family = prompts.reranker
    given = RerankInput(query, documents, instruction, max_tokens_per_doc, truncate)
    if top_n is not None and top_n < 1:
        raise InvalidRequest(f"top_n is {top_n}, it must be at least 1", param="top_n")
    built = family.build(given)

    def finish(result: ScoreResult) -> Ranking:
        scores = _relevance(family, result, raw_scores)
        chosen = np.argsort(-scores, kind="stable")[:top_n]
        return Ranking(
            indices=chosen,
            scores=scores[chosen],
            truncated=_flags(built.truncated, len(documents))[chosen],
            documents=tuple(documents[index] for index in chosen.tolist()),
            prompt_tokens=built.request.num_prompt_tokens,
            cached_tokens=_cached(built.request, result),
        )

    return Call(built.request, finish)


def pairs_call(
    prompts: ModelPrompts,
    pairs: Sequence[tuple[str, str]],
    *,
    instruction: str | None,
    raw_scores: bool,
    max_tokens_per_doc: int | None,
    truncate: bool,
) -> Call[PairScores]:
    _no_single_text(pairs, "pairs")
    for index, pair in enumerate(pairs):
        if isinstance(pair, str) or len(pair) != 2:
            raise InvalidRequest(
                f"pairs[{index}] must be a query and a document", param=f"pairs[{index}]"
            )
    family = prompts.reranker
    queries, documents = [query for query, _ in pairs], [document for _, document in pairs]
    given = RerankInput(queries, documents, instruction, max_tokens_per_doc, truncate, name="pairs")
    built = family.build(given)

    def finish(result: ScoreResult) -> PairScores:
        return PairScores(
            scores=_relevance(family, result, raw_scores),
            truncated=_flags(built.truncated, len(pairs)),
            prompt_tokens=built.request.num_prompt_tokens,
            cached_tokens=_cached(built.request, result),
        )

    return Call(built.request, finish)


def classify_call(prompts: ModelPrompts, given: ClassifyInput) -> Call[Classification]:
    request, classes = build_classes(given, prompts.builder, prompts.family, prompts.head)

    def finish(result: ScoreResult) -> Classification:
        return _classified(classes, request, result)

    return Call(request, finish)


def decide_call(
    prompts: ModelPrompts, text: str, questions: Sequence[Question]
) -> Call[list[Decision]]:
    if not questions:
        raise InvalidRequest("questions must hold at least one question", param="questions")
    asked = [_asked(question, f"questions[{i}]") for i, question in enumerate(questions)]
    request = prompts.questions.build(text, asked, 0)

    def finish(result: ScoreResult) -> list[Decision]:
        rows = label_scores(result, apply_softmax=True)
        masses = label_mass(result, request.label_ids).tolist()
        return [
            _decision(question, row.tolist(), mass)
            for question, row, mass in zip(questions, rows, masses, strict=True)
        ]

    return Call(request, finish)


def classify_input(
    texts: str | Sequence[str],
    query: str | None,
    labels: Labels,
    max_tokens_per_doc: int | None,
    truncate: bool,
) -> ClassifyInput:
    """Return the arguments of `Scorer.classify` as the prompts' input."""
    given = [texts] if isinstance(texts, str) else texts
    return ClassifyInput(given, query, labels, max_tokens_per_doc, truncate)


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


def _classified(classes: Classes, request: ScoreRequest, result: ScoreResult) -> Classification:
    logits = np.stack(result.label_logits).astype(np.float64)
    names = tuple(classes.labels)
    return Classification(
        classes=names,
        probabilities=classes.probabilities(logits),
        best=tuple(names[index] for index in logits.argmax(axis=1).tolist()),
        truncated=_flags(classes.truncated, len(logits)),
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=_cached(request, result),
    )


def _relevance(family: FamilyPrompts, result: ScoreResult, raw_scores: bool) -> Float64Array:
    raw = family.raw_scores(result)
    return raw if raw_scores else family.family.relevance(raw)


def _flags(indices: Sequence[int], count: int) -> BoolArray:
    flags = np.zeros(count, dtype=np.bool_)
    flags[list(indices)] = True
    return flags


def _cached(request: ScoreRequest, result: ScoreResult) -> int:
    return max(0, request.num_prompt_tokens - result.computed_tokens)


def _items(items: Items) -> list[str | list[int]]:
    if isinstance(items, str):
        return [items]
    found: list[str | list[int]] = []
    for index, item in enumerate(items):
        if not isinstance(item, str | Sequence | np.ndarray):
            raise InvalidRequest(
                f"items[{index}] is a {type(item).__name__}; it must be a text or token ids",
                param=f"items[{index}]",
            )
        found.append(item if isinstance(item, str) else list(item))  # type: ignore[arg-type]
    return found


def _no_single_text(given: object, name: str) -> None:
    if isinstance(given, str):  # would be taken for a sequence of texts of one character
        raise InvalidRequest(f"{name} must be a list, not one text", param=name)


def _names(options: CallOptions) -> tuple[str, ...]:
    given = options.labels if options.labels is not None else options.label_token_ids or ()
    return (
        tuple(map(str, given)) if all(isinstance(x, str | int | np.integer) for x in given) else ()
    )


def _rectangle(rows: Sequence[Float64Array | Float32Array]) -> Float64Array:
    table = np.full((len(rows), max(map(len, rows))), np.nan)
    for target, row in zip(table, rows, strict=True):
        target[: len(row)] = row
    return table
