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
    limits: SplitLimits, query: Text, items: Items, unchecked: ScoreRequestOptions
) -> ClientCall[ScoreResponse]:
    """Return a score call, split by the limits.

    Raises:
        ValueError: there are lists of labels, but not one for each item.
        InvalidRequest: the query or an item is neither text nor token ids.
    """
    options = checked_options(ScoreRequestOptions, unchecked)
    # A text is one item, as over HTTP; the server says what is wrong with None.
    elements = [items] if isinstance(items, str) else listed(items, "items")
    read = (_or_null(text_or_ids, element, f"items[{i}]") for i, element in enumerate(elements))
    lists = {"items": [as_json(element) for element in read]}
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

    def join(answered: Sequence[Answered[ScoreAnswer]], common: Common) -> ScoreResponse:
        widths = _widths(answered, options, names, len(elements))
        for part in answered:
            own = widths[part.start : part.stop]
            part.check_table(part.answer.scores, own)
            if options["logprobs"]:
                part.check_table(part.answer.label_logprobs, own)
                part.check_rows(part.answer.label_mass)
        answers = [part.answer for part in answered]
        logprobs = [row for answer in answers for row in answer.label_logprobs or ()]
        mass = [value for answer in answers for value in answer.label_mass or ()]
        return ScoreResponse(
            scores=rectangle([row for answer in answers for row in answer.scores], len(names)),
            logprobs=rectangle(logprobs, len(names)) if options["logprobs"] else None,
            label_mass=_numbers(mass) if options["logprobs"] else None,
            labels=names,
            errors=tuple(error for part in answered for error in part.errors),
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
    unchecked: FamilyRequestOptions,
) -> ClientCall[RerankResponse]:
    options = checked_options(FamilyRequestOptions, unchecked)
    check_text(query, "query")
    read = listed(documents, "documents")
    shared = {"query": query} | fields_of(FamilyRequestOptions, options)
    if top_n is not None:
        shared["top_n"] = top_n
    if rank_fields is not None:
        shared["rank_fields"] = list(rank_fields)
    elements = [as_json(_plain(*numbered)) for numbered in enumerate(read)]

    def join(answered: Sequence[Answered[RerankAnswer]], common: Common) -> RerankResponse:
        for part in answered:
            indices = [result.index for result in part.answer.results]
            own = set(indices) - set(part.failed)
            most = part.count - len(part.failed)
            fits = len(own) == len(indices) == min(most, top_n or most)
            what = f"{len(indices)} results and {len(part.failed)} errors"
            part.check(fits and own <= set(range(part.count)), f"{what}, or wrong places,")
        # The first `top_n` of each part are enough, because no other document can be among the
        # first `top_n` of all. Equal scores are ordered by place.
        ranked = [
            (part.start + result.index, result.relevance_score, result.truncated)
            for part in answered
            for result in part.answer.results
        ]
        ranked.sort(key=lambda entry: (-entry[1], entry[0]))
        best = ranked[: top_n or None]
        places = [place for place, _, _ in best]
        return RerankResponse(
            indices=np.array(places, dtype=np.int64),
            scores=_numbers([score for _, score, _ in best]),
            truncated=np.array([cut for _, _, cut in best], dtype=np.bool_),
            documents=tuple(read[place] for place in places),
            errors=tuple(error for part in answered for error in part.errors),
            **common,
        )

    body = Body(shared, {"documents": elements})
    return list_call("/v1/rerank", body, RerankAnswer, options, limits, join)


def pairs_call(
    limits: SplitLimits, pairs: Iterable[tuple[str, str]], unchecked: FamilyRequestOptions
) -> ClientCall[PairsResponse]:
    options = checked_options(FamilyRequestOptions, unchecked)
    read = [
        [_or_null(_text, text, f"pairs[{index}]") for text in both]
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

    def join(answered: Sequence[Answered[PairsAnswer]], common: Common) -> PairsResponse:
        for part in answered:
            part.check_rows([pair.score for pair in part.answer.data])
            right = all(index == pair.index for index, pair in enumerate(part.answer.data))
            part.check(right, "results in another order")
        pairs = [pair for part in answered for pair in part.answer.data]
        return PairsResponse(
            scores=_numbers([pair.score for pair in pairs]),
            truncated=np.array([pair.truncated for pair in pairs], dtype=np.bool_),
            errors=tuple(error for part in answered for error in part.errors),
            **common,
        )

    body = Body(shared, lists)
    return list_call("/v1/score", body, PairsAnswer, options, limits, join)


def _widths(
    answered: Sequence[Answered[ScoreAnswer]],
    options: ScoreOptions,
    names: Sequence[str],
    count: int,
) -> Sequence[int]:
    """Return each item's number of labels; the first row's, if the server chose the labels."""
    if names:
        return [len(names)] * count
    if options["label_token_ids"] is not None:
        return [len(ids) for ids in options["label_token_ids"]]  # type: ignore[arg-type]  # lists
    rows = (row for part in answered for row in part.answer.scores if row is not None)
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
    limits: SplitLimits, texts: str | Iterable[str], unchecked: ClassifyRequestOptions
) -> ClientCall[ClassifyResponse]:
    options = checked_options(ClassifyRequestOptions, unchecked)
    shared = fields_of(ClassifyRequestOptions, options)
    elements = texts_of([texts] if isinstance(texts, str) else texts, "texts")
    body = Body(shared, {"input": [as_json(text) for text in elements]})

    def join(answered: Sequence[Answered[ClassifyAnswer]], common: Common) -> ClassifyResponse:
        asked = options["labels"]
        classes = list(answered[0].answer.labels if asked is None else asked)
        for part in answered:
            told = part.answer
            part.check_table([text.probs for text in told.data], [len(classes)] * part.count)
            right = told.labels == classes and all(text.label in classes for text in told.data)
            part.check(right, f"{len(told.labels)} other classes than the {len(classes)} asked for")
        data = [text for part in answered for text in part.answer.data]
        return ClassifyResponse(
            classes=tuple(answered[0].answer.labels),
            probabilities=np.array([text.probs for text in data], dtype=np.float64),
            best=tuple(text.label for text in data),
            truncated=np.array([text.truncated for text in data], dtype=np.bool_),
            **common,
        )

    return list_call("/v1/classify", body, ClassifyAnswer, options, limits, join)


def completions_call(
    limits: SplitLimits,
    prompts: str | Ids | Iterable[str] | Iterable[Ids],
    unchecked: PromptRequestOptions,
) -> ClientCall[CompletionsResponse]:
    options = checked_options(PromptRequestOptions, unchecked)
    shared = fields_of(PromptRequestOptions, options, "max_tokens", "echo", "logprobs")
    shared |= {"max_tokens": options["max_tokens"], "echo": options["echo"]}
    if options["logprobs"] is not None:  # 0 is not the default of the route
        shared["logprobs"] = options["logprobs"]
    body = Body(shared, {"prompt": [as_json(prompt) for prompt in _prompts(prompts)]})

    def join(answered: Sequence[Answered[CompletionAnswer]], common: Common) -> CompletionsResponse:
        for part in answered:
            part.check(
                len(part.answer.choices) == part.count, f"{len(part.answer.choices)} choices"
            )
            right = all(_is_whole(choice, options["logprobs"]) for choice in part.answer.choices)
            part.check(right, "lists of tokens and log-probabilities of different lengths")
        choices = [choice for part in answered for choice in part.answer.choices]
        return CompletionsResponse(tuple(map(_completion, choices)), **common)

    return list_call("/v1/completions", body, CompletionAnswer, options, limits, join)


def _prompts(prompts: str | Ids | Iterable[str] | Iterable[Ids]) -> list[str | list[int]]:
    """Return the prompts as a list, also if there is one text or one list of token ids."""
    if isinstance(prompts, str):
        return [text_or_ids(prompts, "prompts")]
    elements = listed(prompts, "prompts")
    if elements and isinstance(elements[0], int | np.integer):
        return [token_ids(elements, "prompts")]
    return [text_or_ids(element, f"prompts[{index}]") for index, element in enumerate(elements)]


def _is_whole(choice: CompletionChoice, asked: int | None) -> bool:
    """Return True if each token has a log-probability, and best tokens if `asked` is over 0."""
    logprobs = choice.logprobs
    if logprobs is None:
        return asked is None
    best = logprobs.top_logprobs
    lengths = {len(logprobs.tokens), len(logprobs.token_logprobs)}
    return len(lengths | ({len(best)} if best is not None else set())) == 1 and (
        best is not None or not asked
    )


def _completion(choice: CompletionChoice) -> Completion:
    logprobs = choice.logprobs or Logprobs([], [], None, [])
    values = [np.nan if value is None else value for value in logprobs.token_logprobs]
    best = logprobs.top_logprobs or [None] * len(values)
    numbers = np.array(values, dtype=np.float64)
    return Completion(choice.text, tuple(logprobs.tokens), numbers, tuple(best))
