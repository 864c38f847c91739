"""Client calls as data: the requests to send, and a function that joins their answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Generic, TypeVar, cast
from uuid import uuid4

import msgspec
import numpy as np

from gpuscore.arrays import Float64Array
from gpuscore.client.errors import BadAnswer
from gpuscore.client.options import RerankOptions, ScoreOptions
from gpuscore.client.results import Document, Ids, Model, RerankResponse, ScoreResponse, Usage
from gpuscore.client.retries import Reply
from gpuscore.client.split import Body, SplitLimits, as_json, text_or_ids, token_ids

ResultT = TypeVar("ResultT", covariant=True)
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class Post:
    """A POST request; `content` makes its body when it is sent."""

    path: str
    content: Callable[[], bytes]
    request_id: str


@dataclass(frozen=True, slots=True)
class ClientCall(Generic[ResultT]):
    """The requests of a call; `join` takes their replies in this order and may raise BadAnswer."""

    parts: list[Post]
    join: Callable[[Sequence[Reply]], ResultT]


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)


class _Scores(msgspec.Struct):
    scores: list[list[float]]
    model: str
    usage: _Usage
    label_logprobs: list[list[float]] | None = None
    label_mass: list[float] | None = None


class _Ranked(msgspec.Struct):
    index: int
    relevance_score: float
    truncated: bool = False


class _Ranking(msgspec.Struct):
    results: list[_Ranked]
    model: str
    usage: _Usage


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


def score_call(
    limits: SplitLimits,
    query: str | Ids,
    items: str | Sequence[str] | Sequence[Ids],
    *,
    labels: Sequence[str] | None = None,
    label_token_ids: Ids | Sequence[Ids] | None = None,
    request_id: str | None = None,
    **options: Any,
) -> ClientCall[ScoreResponse]:
    """Return a score call, split by the limits.

    Raises:
        ValueError: there are lists of labels, but not one for each item.
        TypeError: a token id is not an integer, or an option is unknown.
    """
    shared = {"query": text_or_ids(query)} | _given(options, ScoreOptions)
    given = [items] if isinstance(items, str) else items  # a text is one item, as over HTTP
    lists = {"items": [as_json(text_or_ids(item)) for item in given]}
    if labels is not None:
        shared["labels"] = labels if isinstance(labels, str) else list(labels)
    if label_token_ids is not None:
        lists_of_ids = [ids for ids in label_token_ids if not isinstance(ids, Integral)]
        if not lists_of_ids:
            shared["label_token_ids"] = token_ids(cast(Ids, label_token_ids))
        elif {len(lists_of_ids)} != {len(label_token_ids), len(given)}:
            raise ValueError(f"{len(lists_of_ids)} lists of labels for {len(given)} items")
        else:
            lists["label_token_ids"] = [as_json(token_ids(cast(Ids, ids))) for ids in lists_of_ids]
    body = Body(shared, lists)
    ranges = list(body.parts(limits))

    def join(replies: Sequence[Reply]) -> ScoreResponse:
        answers = [_decode(reply, _Scores) for reply in replies]
        for answer, reply, (start, stop) in zip(answers, replies, ranges, strict=True):
            for rows in (answer.scores, answer.label_logprobs, answer.label_mass):
                if rows is not None and len(rows) != stop - start:
                    raise _bad(reply, f"{len(rows)} rows for {stop - start} items")
        return _joined_scores(answers, replies)

    return ClientCall(_parts("/v1/score", body, ranges, request_id), join)


def rerank_call(
    limits: SplitLimits,
    query: str,
    documents: Sequence[Document],
    *,
    return_documents: bool = False,
    request_id: str | None = None,
    **options: Any,
) -> ClientCall[RerankResponse]:
    if isinstance(documents, str):
        raise TypeError("documents is a text, not a list of them")
    given = _given(options, RerankOptions)
    body = Body({"query": query} | given, {"documents": [as_json(_plain(d)) for d in documents]})
    ranges = list(body.parts(limits))

    def join(replies: Sequence[Reply]) -> RerankResponse:
        answers = [_decode(reply, _Ranking) for reply in replies]
        for answer, reply, (start, stop) in zip(answers, replies, ranges, strict=True):
            found = {result.index for result in answer.results}
            if len(found) != len(answer.results) or not found <= set(range(stop - start)):
                raise _bad(reply, f"results that do not belong to {stop - start} documents")
        starts = [start for start, _ in ranges]
        ranked = _joined_ranking(answers, starts, given.get("top_n") or None)
        return RerankResponse(
            *ranked,
            tuple(documents[i] for i in ranked[0]) if return_documents else None,
            answers[0].model,
            _total(answers),
            _ids(replies),
        )

    return ClientCall(_parts("/v1/rerank", body, ranges, request_id), join)


def models_of(reply: Reply) -> tuple[Model, ...]:
    return tuple(Model(card.id, card.max_model_len) for card in _decode(reply, _Cards).data)


def new_id() -> str:
    return uuid4().hex


def _given(options: dict[str, Any], known: type) -> dict[str, Any]:
    if unknown := options.keys() - known.__annotations__.keys():
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    return {name: value for name, value in options.items() if value is not None}


def _plain(document: Document) -> str | dict[str, Any]:
    return document if isinstance(document, str) else dict(document)


def _parts(path: str, body: Body, ranges: list[tuple[int, int]], given: str | None) -> list[Post]:
    request_id = given or new_id()
    ids = [f"{request_id}-{number}" for number in range(len(ranges))]
    return [
        Post(path, lambda bounds=bounds: body.encode(*bounds), part_id)  # type: ignore[misc]
        for bounds, part_id in zip(ranges, ids if len(ranges) > 1 else [request_id], strict=True)
    ]


def _decode(reply: Reply, kind: type[AnswerT]) -> AnswerT:
    try:
        return msgspec.json.decode(reply.content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad(reply, str(error)) from error


def _bad(reply: Reply, message: str) -> BadAnswer:
    return BadAnswer(f"an answer that cannot be used: {message}", reply.request_id)


def _joined_scores(answers: list[_Scores], replies: Sequence[Reply]) -> ScoreResponse:
    first = answers[0]
    mass = [value for answer in answers for value in answer.label_mass or ()]
    return ScoreResponse(
        _rectangle([row for answer in answers for row in answer.scores]),
        None
        if first.label_logprobs is None
        else _rectangle([row for answer in answers for row in answer.label_logprobs or ()]),
        None if first.label_mass is None else np.array(mass, dtype=np.float64),
        first.model,
        _total(answers),
        _ids(replies),
    )


def _joined_ranking(
    answers: list[_Ranking], starts: list[int], most: int | None
) -> tuple[Any, Float64Array, Any]:
    """Join the rankings of parts: (indices in the whole list, scores, truncated).

    The best comes first; equal scores are ordered by index. With `most`, the first `most` of each
    part are enough, because no other document can be among the first `most` of all.
    """
    ranked = [
        (start + result.index, result.relevance_score, result.truncated)
        for start, answer in zip(starts, answers, strict=True)
        for result in answer.results
    ]
    ranked.sort(key=lambda entry: (-entry[1], entry[0]))
    indices, scores, truncated = zip(*ranked[:most], strict=True) if ranked else ((), (), ())
    return (
        np.array(indices, dtype=np.int64),
        np.array(scores, dtype=np.float64),
        np.array(truncated, dtype=np.bool_),
    )


def _total(answers: Sequence[_Scores] | Sequence[_Ranking]) -> Usage:
    return Usage(
        sum(answer.usage.prompt_tokens for answer in answers),
        sum(answer.usage.prompt_tokens_details.cached_tokens for answer in answers),
    )


def _ids(replies: Sequence[Reply]) -> tuple[str, ...]:
    return tuple(reply.request_id for reply in replies)


def _rectangle(rows: list[list[float]]) -> Float64Array:
    table = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for target, row in zip(table, rows, strict=True):
        target[: len(row)] = row
    return table
