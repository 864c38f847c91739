"""Calls of `Scorer` and `AsyncScorer`, one by one or many in a row: turn arguments into a request,
and the engine's result into the caller's."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from gpuscore.errors import GpuscoreError, InvalidRequest
from gpuscore.offline.results import (
    Classification,
    PairScores,
    Ranking,
    Scores,
    TokenCounts,
    column,
    rectangle,
)
from gpuscore.prompts.classes import build_classes
from gpuscore.prompts.model import ModelPrompts
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.batch import BoolArray, Float32Array, Float64Array
from gpuscore.types.call_arguments import (
    ClassifyOptions,
    FamilyOptions,
    Items,
    ScoreOptions,
    Text,
    check_list,
    checked_options,
    is_mean,
    label_names,
    listed,
    pair,
    pairs_of,
    text_or_ids,
)
from gpuscore.types.call_arguments import texts as texts_of
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.results import (
    ItemErrors,
    check_on_error,
    check_temperature,
    check_text,
    checked_texts,
    label_logprobs,
    label_mass,
    label_scores,
    per_token,
    scored_places,
    spread,
)

ValueT = TypeVar("ValueT")
Submit = Callable[[ScoreRequest], "Future[ScoreResult]"]


@dataclass(frozen=True, slots=True)
class Call(Generic[ValueT]):
    """A request for the engine, and the function that makes the caller's value of its result.

    Both request and result are None if there is no item to score.
    """

    request: ScoreRequest | None
    finish: Callable[[ScoreResult | None], ValueT]

    @property
    def num_tokens(self) -> int:
        """Tokens to compute if nothing is cached."""
        return 0 if self.request is None else self.request.num_tokens


def in_order(
    calls: Iterator[Call[ValueT]], submit: Submit, most: int
) -> Generator[ValueT, None, None]:
    """Yield the values of calls in their order.

    Calls that have not begun are dropped if the iterator is closed early, or after an error.

    Args:
        calls: prepared one by one; may raise GpuscoreError.
        submit: passes a request to the engine.
        most: no further call is prepared while requests of more than this number of tokens wait.

    Raises:
        GpuscoreError: the first error in the order of the calls; the values before it have come.
    """
    waiting: deque[tuple[Call[ValueT], Future[ScoreResult] | None]] = deque()
    ahead, failure = 0, None
    try:
        while True:
            try:
                call = next(calls, None)
            except GpuscoreError as error:
                failure = error
                break
            if call is None:
                break
            waiting.append((call, None if call.request is None else submit(call.request)))
            ahead += call.num_tokens
            while ahead > most and len(waiting) > 1:
                ahead -= waiting[0][0].num_tokens
                yield _value(*waiting.popleft())
        while waiting:
            yield _value(*waiting.popleft())
        if failure is not None:
            raise failure
    finally:
        failure = None  # its frames refer to this one
        for _, future in waiting:
            if future is not None:
                future.cancel()


def _value(call: Call[ValueT], future: "Future[ScoreResult] | None") -> ValueT:
    return call.finish(None if future is None else future.result())


def score_call(
    prompts: ModelPrompts, query: Text, items: Items, options: ScoreOptions
) -> Call[Scores]:
    return _score_call(prompts, query, items, checked_options(ScoreOptions, options))


def _score_call(
    prompts: ModelPrompts, query: Text, items: Items, options: ScoreOptions
) -> Call[Scores]:
    softmax, temperature = options["apply_softmax"], options["temperature"]
    check_temperature(temperature, softmax)
    mean, names = is_mean(options), label_names(options)
    errors = ItemErrors() if check_on_error(options["on_error"]) else None
    asked = text_or_ids(query, "query")
    read = _items(items, asked, errors)
    wanted = ScoreInput(
        query=asked,
        items=read,
        labels=options["labels"],  # type: ignore[arg-type]  # lists by now
        label_token_ids=options["label_token_ids"],  # type: ignore[arg-type]
        label_sequences=options["label_sequences"],  # type: ignore[arg-type]
        item_first=options["item_first"],
        need_lse=options["logprobs"] or not softmax,
    )
    builder = prompts.builder
    request = builder.build(wanted, errors)
    failed = errors.listed() if errors else ()
    if options["logits"] and request is not None and request.trie is not None:
        raise InvalidRequest("labels of several tokens have no logits", param="logits")

    def table(rows: Sequence[Float64Array | Float32Array]) -> Float64Array:
        return rectangle([*spread(rows, failed, len(read))], len(names))

    def finish(result: ScoreResult | None) -> Scores:
        scores: Sequence[Float64Array] = ()
        logits: Sequence[Float32Array] = ()
        logprobs, mass = scores, None
        if request is not None and result is not None:
            shown = per_token(result, request.trie) if mean else result
            scores = label_scores(shown, apply_softmax=softmax, temperature=temperature)
            if options["logprobs"]:
                logprobs, mass = label_logprobs(result), label_mass(result, request)
            logits = result.label_logits
        return Scores(
            scores=table(scores),
            logprobs=table(logprobs) if options["logprobs"] else None,
            label_mass=column(mass, failed, len(read)) if options["logprobs"] else None,
            **_usage(request, result),
            logits=table(logits) if options["logits"] else None,
            labels=names,
            errors=failed,
        )

    return Call(request, finish)


def score_calls(
    prompts: ModelPrompts, requests: Iterable[tuple[Text, Items]], unchecked: ScoreOptions
) -> Iterator[Call[Scores]]:
    """Return the calls of `score_many`, each made when it is asked for."""
    options = checked_options(ScoreOptions, unchecked)

    def calls() -> Iterator[Call[Scores]]:
        check_list(requests, "requests")
        for index, request in enumerate(requests):
            query, items = pair(request, f"requests[{index}]", "a query and its items")
            yield _score_call(prompts, query, items, options)

    return calls()


def rerank_call(
    prompts: ModelPrompts,
    query: str,
    documents: Iterable[str],
    top_n: int | None,
    options: FamilyOptions,
) -> Call[Ranking]:
    options = checked_options(FamilyOptions, options)
    check_text(query, "query")
    read = listed(documents, "documents")
    if top_n is not None and top_n < 1:
        raise InvalidRequest(f"top_n is {top_n}, it must be at least 1", param="top_n")
    call = _family_call(prompts, query, read, options, name="documents")

    def finish(result: ScoreResult | None) -> Ranking:
        scored = call.finish(result)
        places = np.array(scored_places(scored.errors, len(read)), dtype=np.int64)
        chosen = places[np.argsort(-scored.scores[places], kind="stable")[:top_n]]
        return Ranking(
            indices=chosen,
            scores=scored.scores[chosen],
            truncated=scored.truncated[chosen],
            documents=tuple(read[index] for index in chosen.tolist()),
            prompt_tokens=scored.prompt_tokens,
            cached_tokens=scored.cached_tokens,
            errors=scored.errors,
        )

    return Call(call.request, finish)


def pairs_call(
    prompts: ModelPrompts, pairs: Iterable[tuple[str, str]], options: FamilyOptions
) -> Call[PairScores]:
    options = checked_options(FamilyOptions, options)
    read = pairs_of(pairs)
    queries, documents = [query for query, _ in read], [document for _, document in read]
    return _family_call(prompts, queries, documents, options, name="pairs")


def _family_call(
    prompts: ModelPrompts,
    query: str | list[str],
    documents: Sequence[str],
    options: FamilyOptions,
    name: str,
) -> Call[PairScores]:
    """Return the call that scores documents, in their order, in the prompt of the family."""
    family = prompts.reranker
    inputs = RerankInput(
        query,
        documents,
        instruction=options["instruction"],
        most_tokens=options["max_tokens_per_doc"],
        fit=options["truncate"],
        name=name,
    )
    errors = ItemErrors() if check_on_error(options["on_error"]) else None
    if errors is None:
        if isinstance(query, list):
            checked_texts(query, name, None)
        checked_texts(documents, name, None)
    built = family.build(inputs, errors)
    failed, request = errors.listed() if errors else (), built.request

    def finish(result: ScoreResult | None) -> PairScores:
        scores = None if result is None else family.raw_scores(result)
        if scores is not None and not options["raw_scores"]:
            scores = family.family.relevance(scores)
        return PairScores(
            scores=column(scores, failed, len(documents)),
            truncated=_flags(built.truncated, len(documents)),
            **_usage(request, result),
            errors=failed,
        )

    return Call(request, finish)


def classify_call(
    prompts: ModelPrompts, texts: str | Iterable[str], options: ClassifyOptions
) -> Call[Classification]:
    options = checked_options(ClassifyOptions, options)
    read = texts_of([texts] if isinstance(texts, str) else texts, "texts")
    most, fit = options["max_tokens_per_doc"], options["truncate"]
    wanted = RerankInput(options["query"], read, most_tokens=most, fit=fit, name="input")
    labels: Any = options["labels"]  # a list by now
    request, classes = build_classes(prompts, wanted, labels)

    def finish(result: ScoreResult | None) -> Classification:
        assert result is not None  # noqa: S101  (there is a text)
        logits = np.stack(result.label_logits).astype(np.float64)
        names = tuple(classes.labels)
        return Classification(
            classes=names,
            probabilities=classes.probabilities(logits),
            best=tuple(names[index] for index in logits.argmax(axis=1).tolist()),
            truncated=_flags(classes.truncated, len(logits)),
            **_usage(request, result),
        )

    return Call(request, finish)


def _flags(indices: Sequence[int], count: int) -> BoolArray:
    flags = np.zeros(count, dtype=np.bool_)
    flags[list(indices)] = True
    return flags


def _usage(request: ScoreRequest | None, result: ScoreResult | None) -> TokenCounts:
    """Return the numbers of tokens of a result."""
    if request is None or result is None:
        return {"prompt_tokens": 0, "cached_tokens": 0}
    tokens = request.num_prompt_tokens
    return {"prompt_tokens": tokens, "cached_tokens": max(0, tokens - result.computed_tokens)}


def _items(
    items: Items, query: str | list[int], errors: ItemErrors | None
) -> list[str | list[int]]:
    """Return the items; an empty item replaces each that is neither text nor ids."""
    elements = [items] if isinstance(items, str) else listed(items, "items")
    is_text = any(isinstance(item, str) for item in elements) or (isinstance(query, str) and query)
    read: list[str | list[int]] = []
    for index, item in enumerate(elements):
        try:
            read.append(text_or_ids(item, f"items[{index}]"))
        except InvalidRequest as error:
            if errors is None:
                raise
            errors.add(index, error)
            read.append("" if is_text else [])
    return read
