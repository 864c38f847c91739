"""Calls of `score`, `rerank` and `score_pairs`."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, cast

import msgspec
import numpy as np

from gpuscore.call_options import (
    FamilyOptions,
    Ids,
    Items,
    LabelSequences,
    ScoreOptions,
    Text,
)
from gpuscore.client.calls import Answer, Answered, ClientCall, Common, ListCall
from gpuscore.client.options import RequestOptions, given
from gpuscore.client.results import PairsResponse, RerankResponse, ScoreResponse
from gpuscore.client.split import Body, SplitLimits, as_json, text_or_ids, token_ids
from gpuscore.results import Document, rectangle


class _Scores(Answer):
    scores: list[list[float] | None]
    label_logprobs: list[list[float] | None] | None = None
    label_mass: list[float | None] | None = None


class _Ranked(msgspec.Struct):
    index: int
    relevance_score: float
    truncated: bool = False


class _Ranking(Answer):
    results: list[_Ranked]


class _Pair(msgspec.Struct):
    index: int
    score: float | None
    truncated: bool = False


class _Pairs(Answer):
    data: list[_Pair]


def score_call(
    limits: SplitLimits, query: Text, items: Items, options: ScoreOptions, more: RequestOptions
) -> ClientCall[ScoreResponse]:
    """Return a score call, split by the limits.

    Raises:
        ValueError: there are lists of labels, but not one for each item.
        TypeError: a token id is not an integer.
    """
    elements = [items] if isinstance(items, str) else items  # a text is one item, as over HTTP
    lists = {"items": [as_json(None if one is None else text_or_ids(one)) for one in elements]}
    asked = options.logprobs or None
    shared = {"query": text_or_ids(query)} | given(
        labels=options.labels if isinstance(options.labels, str | None) else list(options.labels),
        label_sequences=_sequences(options.label_sequences),
        label_length_normalization=options.label_length_normalization,
        apply_softmax=options.apply_softmax,
        temperature=options.temperature,
        item_first=options.item_first,
        return_label_logprobs=asked,
        return_label_mass=asked,
        on_error=options.on_error,
    )
    if options.label_token_ids is not None:
        labels = options.label_token_ids
        lists_of_ids = [ids for ids in labels if not isinstance(ids, Integral)]
        if not lists_of_ids:
            shared["label_token_ids"] = token_ids(cast(Ids, labels))
        elif {len(lists_of_ids)} != {len(labels), len(elements)}:
            raise ValueError(f"{len(lists_of_ids)} lists of labels for {len(elements)} items")
        else:
            lists["label_token_ids"] = [as_json(token_ids(cast(Ids, ids))) for ids in lists_of_ids]
    width = len(options.names)

    def join(found: Sequence[Answered[_Scores]], common: Common) -> ScoreResponse:
        for one in found:
            for rows in (one.answer.scores, one.answer.label_logprobs, one.answer.label_mass):
                one.check_rows(rows)
        answers = [one.answer for one in found]
        logprobs = [row for answer in answers for row in answer.label_logprobs or ()]
        mass = [value for answer in answers for value in answer.label_mass or ()]
        return ScoreResponse(
            scores=rectangle([row for answer in answers for row in answer.scores], width),
            logprobs=rectangle(logprobs, width) if options.logprobs else None,
            label_mass=_numbers(mass) if options.logprobs else None,
            labels=options.names,
            errors=tuple(error for one in found for error in one.errors),
            **common.of_result,
        )

    body = Body(shared | more.fields, lists)
    return ListCall("/v1/score", body, _Scores, more).call(limits, join)


def rerank_call(
    limits: SplitLimits,
    query: str,
    documents: Sequence[Document],
    top_n: int | None,
    rank_fields: Sequence[str] | None,
    options: FamilyOptions,
    more: RequestOptions,
) -> ClientCall[RerankResponse]:
    if isinstance(documents, str):
        raise TypeError("documents is a text, not a list of them")
    shared = {"query": query} | given(
        top_n=top_n,
        rank_fields=None if rank_fields is None else list(rank_fields),
        instruction=options.instruction,
        raw_scores=options.raw_scores,
        max_tokens_per_doc=options.max_tokens_per_doc,
        truncate=options.truncate,
        on_error=options.on_error,
    )
    body = Body(shared | more.fields, {"documents": [as_json(_plain(d)) for d in documents]})

    def join(found: Sequence[Answered[_Ranking]], common: Common) -> RerankResponse:
        for one in found:
            indices = [result.index for result in one.answer.results]
            indices += [error.index for error in one.answer.errors or ()]
            own = set(indices)
            fits = len(own) == len(indices) and own <= set(range(one.count))
            one.check(fits, "results that do not belong to them")
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
            documents=tuple(documents[place] for place in places),
            errors=tuple(error for one in found for error in one.errors),
            **common.of_result,
        )

    return ListCall("/v1/rerank", body, _Ranking, more).call(limits, join)


def pairs_call(
    limits: SplitLimits,
    pairs: Sequence[tuple[str, str]],
    options: FamilyOptions,
    more: RequestOptions,
) -> ClientCall[PairsResponse]:
    if any(isinstance(pair, str) or len(pair) != 2 for pair in pairs):
        raise TypeError("pairs must be a list of pairs of a query and a document")
    shared = given(
        instruction=options.instruction,
        use_activation=False if options.raw_scores else None,
        max_tokens_per_doc=options.max_tokens_per_doc,
        truncate_prompt_tokens=-1 if options.truncate else None,
        on_error=options.on_error,
    )
    lists = {
        "queries": [as_json(query) for query, _ in pairs],
        "documents": [as_json(document) for _, document in pairs],
    }

    def join(found: Sequence[Answered[_Pairs]], common: Common) -> PairsResponse:
        for one in found:
            one.check_rows([pair.score for pair in one.answer.data])
        pairs = [pair for one in found for pair in one.answer.data]
        return PairsResponse(
            scores=_numbers([pair.score for pair in pairs]),
            truncated=np.array([pair.truncated for pair in pairs], dtype=np.bool_),
            errors=tuple(error for one in found for error in one.errors),
            **common.of_result,
        )

    body = Body(shared | more.fields, lists)
    return ListCall("/v1/score", body, _Pairs, more).call(limits, join)


def _sequences(given: LabelSequences) -> list[list[int]] | None:
    return None if given is None else [token_ids(ids) for ids in given]


def _numbers(values: Sequence[float | None]) -> Any:
    """Return float64 [n]; NaN for None."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _plain(document: Document) -> str | dict[str, Any] | None:
    return document if isinstance(document, str | None) else dict(document)
