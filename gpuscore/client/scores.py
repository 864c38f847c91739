"""Calls whose answers are rows: `score`, `rerank`, `score_pairs`, `classify`, `completions`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from gpuscore.client.calls import Answered, ClientCall, Common, list_call
from gpuscore.client.options import (
    Body,
    ClassifyRequestOptions,
    FamilyRequestOptions,
    PromptRequestOptions,
    ScoreRequestOptions,
    SplitLimits,
    as_json,
    fields_of,
)
from gpuscore.client.results import (
    ClassifyResponse,
    Completion,
    CompletionsResponse,
    PairsResponse,
    RerankResponse,
    ScoreResponse,
)
from gpuscore.dialects.answers import (
    ClassifyAnswer,
    CompletionAnswer,
    CompletionChoice,
    Logprobs,
    PairsAnswer,
    RerankAnswer,
    ScoreAnswer,
)
from gpuscore.types.call_arguments import (
    Ids,
    Items,
    ScoreOptions,
    Text,
    checked_options,
    label_names,
    listed,
    pairs_of,
    text_or_ids,
    token_ids,
)
from gpuscore.types.call_arguments import texts as texts_of
from gpuscore.types.results import Document, check_text, rectangle

ReadT = TypeVar("ReadT")


def score_call(
    limits: SplitLimits, query: Text, items: Items, given: ScoreRequestOptions
) -> ClientCall[ScoreResponse]:
    """Return a score call, split by the limits.

    Raises:
        ValueError: there are lists of labels, but not one for each item.
        InvalidRequest: the query or an item is neither text nor token ids.
    """
    options = checked_options(ScoreRequestOptions, given)
    # A text is one item, as over HTTP; the server says what is wrong with None.
    elements = [items] if isinstance(items, str) else listed(items, "items")
    read = (_or_null(text_or_ids, one, f"items[{i}]") for i, one in enumerate(elements))
    lists = {"items": [as_json(one) for one in read]}
    shared = fields_of(ScoreRequestOptions, options, "logprobs", "label_token_ids")
    shared |= {"query": text_or_ids(query, "query")}
    if options["logprobs"]:
        shared["return_label_logprobs"] = shared["return_label_mass"] = options["logprobs"]
    if options["label_token_ids"] is not None:
        labels = list(options["label_token_ids"])
        if not any(isinstance(ids, list) for ids in labels):
            shared["label_token_ids"] = labels
        elif len(labels) != len(elements):
            raise ValueError(f"{len(labels)} lists of labels for {len(elements)} items")
        else:
            lists["label_token_ids"] = [as_json(ids) for ids in labels]
    names = label_names(options)

    def join(found: Sequence[Answered[ScoreAnswer]], common: Common) -> ScoreResponse:
        widths = _widths(found, options, names, len(elements))
        for one in found:
            own = widths[one.start : one.stop]
            one.check_table(one.answer.scores, own)
            if options["logprobs"]:
                one.check_table(one.answer.label_logprobs, own)
                one.check_rows(one.answer.label_mass)
        answers = [one.answer for one in found]
        logprobs = [row for answer in answers for row in answer.label_logprobs or ()]
        mass = [value for answer in answers for value in answer.label_mass or ()]
        return ScoreResponse(
            scores=rectangle([row for answer in answers for row in answer.scores], len(names)),
            logprobs=rectangle(logprobs, len(names)) if options["logprobs"] else None,
            label_mass=_numbers(mass) if options["logprobs"] else None,
            labels=names,
            errors=tuple(error for one in found for error in one.errors),
            **common,
        )

    body = Body(shared, lists)
    return list_call("/v1/score", body, ScoreAnswer, options, limits, join)


def rerank_call(
    limits: SplitLimits,
    query: str,
    documents: Iterable[Document],
    top_n: int | None,
    rank_fields: Sequence[str] | None,
    given: FamilyRequestOptions,
) -> ClientCall[RerankResponse]:
    options = checked_options(FamilyRequestOptions, given)
    check_text(query, "query")
    read = listed(documents, "documents")
    shared = {"query": query} | fields_of(FamilyRequestOptions, options)
    if top_n is not None:
        shared["top_n"] = top_n
    if rank_fields is not None:
        shared["rank_fields"] = list(rank_fields)
    elements = [as_json(_plain(*one)) for one in enumerate(read)]

    def join(found: Sequence[Answered[RerankAnswer]], common: Common) -> RerankResponse:
        for one in found:
            indices = [result.index for result in one.answer.results]
            own = set(indices) - set(one.failed)
            most = one.count - len(one.failed)
            fits = len(own) == len(indices) == min(most, top_n or most)
            what = f"{len(indices)} results and {len(one.failed)} errors"
            one.check(fits and own <= set(range(one.count)), f"{what}, or wrong places,")
        # The first `top_n` of each part are enough, because no other document can be among the
        # first `top_n` of all. Equal scores are ordered by place.
        ranked = [
            (one.start + result.index, result.relevance_score, result.truncated)
            for one in found
            for result in one.answer.results
        ]
        ranked.sort(key=lambda entry: (-entry[1], entry[0]))
        best = ranked[: top_n or None]
        places = [place for place, _, _ in best]
        return RerankResponse(
            indices=np.array(places, dtype=np.int64),
            scores=_numbers([score for _, score, _ in best]),
            truncated=np.array([cut for _, _, cut in best], dtype=np.bool_),
            documents=tuple(read[place] for place in places),
            errors=tuple(error for one in found for error in one.errors),
            **common,
        )

    body = Body(shared, {"documents": elements})
    return list_call("/v1/rerank", body, RerankAnswer, options, limits, join)


def pairs_call(
    limits: SplitLimits, pairs: Iterable[tuple[str, str]], given: FamilyRequestOptions
) -> ClientCall[PairsResponse]:
    options = checked_options(FamilyRequestOptions, given)
    read = [
        [_or_null(_text, one, f"pairs[{index}]") for one in both]
        for index, both in enumerate(pairs_of(pairs))
    ]
    shared = fields_of(FamilyRequestOptions, options, "raw_scores", "truncate")
    if options["raw_scores"]:
        shared["use_activation"] = False
    if options["truncate"]:
        shared["truncate_prompt_tokens"] = -1
    lists = {
        "queries": [as_json(query) for query, _ in read],
        "documents": [as_json(document) for _, document in read],
    }

    def join(found: Sequence[Answered[PairsAnswer]], common: Common) -> PairsResponse:
        for one in found:
            one.check_rows([pair.score for pair in one.answer.data])
            right = all(index == pair.index for index, pair in enumerate(one.answer.data))
            one.check(right, "results in another order")
        pairs = [pair for one in found for pair in one.answer.data]
        return PairsResponse(
            scores=_numbers([pair.score for pair in pairs]),
            truncated=np.array([pair.truncated for pair in pairs], dtype=np.bool_),
            errors=tuple(error for one in found for error in one.errors),
            **common,
        )

    body = Body(shared, lists)
    return list_call("/v1/score", body, PairsAnswer, options, limits, join)


def _widths(
    found: Sequence[Answered[ScoreAnswer]],
    options: ScoreOptions,
    names: Sequence[str],
    count: int,
) -> Sequence[int]:
    """Return each item's number of labels; the first row's, if the server chose the labels."""
    if names:
        return [len(names)] * count
    if options["label_token_ids"] is not None:
        return [len(ids) for ids in options["label_token_ids"]]  # type: ignore[arg-type]  # lists
    rows = (row for one in found for row in one.answer.scores if row is not None)
    return [max(1, len(next(rows, ())))] * count


def _numbers(values: Sequence[float | None]) -> Any:
    """Return float64 [n]; NaN for None."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _plain(index: int, document: Document | None) -> str | dict[str, Any] | None:
    if isinstance(document, Mapping):
        return dict(document)
    return _or_null(_text, document, f"documents[{index}]")


def _text(value: Any, param: str) -> str:
    check_text(value, param)
    return str(value)


def _or_null(read: Callable[[Any, str], ReadT], value: Any, param: str) -> ReadT | None:
    """Return the value as read; None for None, which the server can refuse alone."""
    return None if value is None else read(value, param)


def classify_call(
    limits: SplitLimits, texts: str | Iterable[str], given: ClassifyRequestOptions
) -> ClientCall[ClassifyResponse]:
    options = checked_options(ClassifyRequestOptions, given)
    shared = fields_of(ClassifyRequestOptions, options)
    elements = texts_of([texts] if isinstance(texts, str) else texts, "texts")
    body = Body(shared, {"input": [as_json(text) for text in elements]})

    def join(found: Sequence[Answered[ClassifyAnswer]], common: Common) -> ClassifyResponse:
        asked = options["labels"]
        classes = list(found[0].answer.labels if asked is None else asked)
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
            **common,
        )

    return list_call("/v1/classify", body, ClassifyAnswer, options, limits, join)


def completions_call(
    limits: SplitLimits,
    prompts: str | Ids | Iterable[str] | Iterable[Ids],
    given: PromptRequestOptions,
) -> ClientCall[CompletionsResponse]:
    options = checked_options(PromptRequestOptions, given)
    shared = fields_of(PromptRequestOptions, options, "max_tokens", "echo", "logprobs")
    shared |= {"max_tokens": options["max_tokens"], "echo": options["echo"]}
    if options["logprobs"] is not None:  # 0 is not the default of the route
        shared["logprobs"] = options["logprobs"]
    body = Body(shared, {"prompt": [as_json(prompt) for prompt in _prompts(prompts)]})

    def join(found: Sequence[Answered[CompletionAnswer]], common: Common) -> CompletionsResponse:
        for one in found:
            one.check(len(one.answer.choices) == one.count, f"{len(one.answer.choices)} choices")
            right = all(_is_whole(choice, options["logprobs"]) for choice in one.answer.choices)
            one.check(right, "lists of tokens and log-probabilities of different lengths")
        choices = [choice for one in found for choice in one.answer.choices]
        return CompletionsResponse(tuple(map(_completion, choices)), **common)

    return list_call("/v1/completions", body, CompletionAnswer, options, limits, join)


def _prompts(given: str | Ids | Iterable[str] | Iterable[Ids]) -> list[str | list[int]]:
    """Return the prompts as a list, also if there is one text or one list of token ids."""
    if isinstance(given, str):
        return [text_or_ids(given, "prompts")]
    elements = listed(given, "prompts")
    if elements and isinstance(elements[0], int | np.integer):
        return [token_ids(elements, "prompts")]
    return [text_or_ids(one, f"prompts[{index}]") for index, one in enumerate(elements)]


def _is_whole(choice: CompletionChoice, asked: int | None) -> bool:
    """Return True if each token has a log-probability, and best tokens if `asked` is over 0."""
    found = choice.logprobs
    if found is None:
        return asked is None
    best = found.top_logprobs
    lengths = {len(found.tokens), len(found.token_logprobs)}
    return len(lengths | ({len(best)} if best is not None else set())) == 1 and (
        best is not None or not asked
    )


def _completion(choice: CompletionChoice) -> Completion:
    found = choice.logprobs or Logprobs([], [], None, [])
    values = [np.nan if value is None else value for value in found.token_logprobs]
    best = found.top_logprobs or [None] * len(values)
    numbers = np.array(values, dtype=np.float64)
    return Completion(choice.text, tuple(found.tokens), numbers, tuple(best))
