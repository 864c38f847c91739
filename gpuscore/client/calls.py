"""Client calls as data: the requests to send, and a function that joins their answers."""

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar
from uuid import uuid4

import msgspec

from gpuscore.client.errors import BadAnswer
from gpuscore.client.options import Body, RequestOptions, SplitLimits
from gpuscore.client.results import Model
from gpuscore.client.retries import UNREADABLE, Reply
from gpuscore.dialects.answers import (
    ClassifyAnswer,
    CompletionAnswer,
    PairsAnswer,
    RerankAnswer,
    ScoreAnswer,
)
from gpuscore.dialects.wire import FailedItem
from gpuscore.types.results import ItemError, TokenCounts

ResultT = TypeVar("ResultT", covariant=True)
ListAnswer: TypeAlias = ScoreAnswer | PairsAnswer | RerankAnswer | ClassifyAnswer | CompletionAnswer
AnswerT = TypeVar("AnswerT", bound=ListAnswer)
CardsT = TypeVar("CardsT")
# Of one answer. "0," becomes 32 bytes, so a limit on bytes alone does not bound memory. Scores of
# 16 digits come to fewer values in 256 MiB.
MOST_VALUES = 2**24


@dataclass(frozen=True, slots=True)
class Post:
    """A request; `content` makes its body when it is sent, and without a body it is a GET.

    Args:
        first: the place of its first element in the whole list.
    """

    path: str
    content: Callable[[], bytes] | None
    request_id: str
    first: int = 0


@dataclass(frozen=True, slots=True)
class ClientCall(Generic[ResultT]):
    """The requests of a call; `join` takes their replies in this order and may raise BadAnswer."""

    parts: list[Post]
    join: Callable[[Sequence[Reply]], ResultT]


@dataclass(frozen=True, slots=True)
class Answered(Generic[AnswerT]):
    """The answer to a part of a list: to its elements from `start` to `stop`."""

    answer: AnswerT
    reply: Reply
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def _refused(self) -> list[FailedItem]:
        return getattr(self.answer, "errors", None) or []

    @property
    def errors(self) -> Iterator[ItemError]:
        """The errors, with places in the whole list."""
        for error in self._refused:
            place = error.index + self.start
            message = error.message.replace(f"[{error.index}]", f"[{place}]", 1)
            yield ItemError(place, error.code, message)

    @property
    def tokens(self) -> tuple[int, int]:
        """The numbers of prompt tokens and cached tokens; raises BadAnswer if one is negative."""
        usage = self.answer.usage
        counts = usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
        self.check(min(counts) >= 0, f"{counts[0]} prompt tokens, {counts[1]} cached ones")
        return counts

    def check(self, right: bool, what: str) -> None:
        """Raise BadAnswer, which says what is in the answer, unless it is right."""
        if not right:
            raise bad_answer(self.reply, f"{what} for {self.count} elements")

    @property
    def failed(self) -> list[int]:
        """The places of the elements with errors."""
        return [error.index for error in self._refused]

    def check_errors(self, asked: bool) -> None:
        """Raise BadAnswer for errors that nobody asked for, or that do not belong to elements."""
        places = sorted(set(self.failed) & set(range(self.count if asked else 0)))
        self.check(self.failed == places, f"errors at {self.failed[:9]}")

    def check_rows(self, rows: Sequence[object] | None) -> None:
        """Raise BadAnswer unless there is a row for each element without an error."""
        self.check(rows is not None and len(rows) == self.count, f"{len(rows or ())} rows")
        missing = [index for index, row in enumerate(rows or ()) if row is None]
        what = f"{len(missing)} empty rows and {len(self.failed)} errors"
        self.check(missing == self.failed, what)

    def check_table(self, rows: Sequence[Sized | None] | None, widths: Sequence[int]) -> None:
        """Raise BadAnswer unless each row has as many columns as its element has labels."""
        self.check_rows(rows)
        for index, (row, width) in enumerate(zip(rows or (), widths, strict=True)):
            if row is not None and len(row) != width:
                what = f"row {index} has {len(row)} columns for {width} labels"
                raise bad_answer(self.reply, what)


class Common(TokenCounts):
    """The part that the results of all list calls share: model, sums of tokens, request ids."""

    model: str
    request_ids: tuple[str, ...]


def list_call(
    path: str,
    body: Body,
    kind: type[AnswerT],
    options: RequestOptions,
    limits: SplitLimits,
    join: Callable[[Sequence[Answered[AnswerT]], Common], ResultT],
) -> ClientCall[ResultT]:
    """Return a call whose list may be divided among several requests.

    Args:
        path: the route.
        body: its list, and the fields that all requests share.
        kind: of each answer.
        options: of the call.
        limits: of each request.
        join: makes the result of the answers, in the list's order; may raise BadAnswer.
    """
    ranges = list(body.parts(limits))
    whole = options["request_id"] or new_id()
    ids = [whole] if len(ranges) == 1 else [f"{whole}-{n}" for n in range(len(ranges))]
    posts = [
        Post(path, partial(body.encode, *bounds), part_id, bounds[0])
        for bounds, part_id in zip(ranges, ids, strict=True)
    ]

    def join_replies(replies: Sequence[Reply]) -> ResultT:
        answered = [
            Answered(decode(reply, kind), reply, *bounds)
            for reply, bounds in zip(replies, ranges, strict=True)
        ]
        asked = body.shared.get("on_error") == "null"
        for part in answered:
            part.check_errors(asked)
        return join(answered, _common(answered))

    return ClientCall(posts, join_replies)


def _common(answered: Sequence[Answered[Any]]) -> Common:
    tokens = [part.tokens for part in answered]
    return Common(
        model=answered[0].answer.model,
        prompt_tokens=sum(prompt for prompt, _ in tokens),
        cached_tokens=sum(cached for _, cached in tokens),
        request_ids=tuple(part.reply.request_id for part in answered),
    )


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


def models_call() -> ClientCall[tuple[Model, ...]]:
    def join(replies: Sequence[Reply]) -> tuple[Model, ...]:
        cards = decode(replies[0], _Cards).data
        return tuple(Model(card.id, card.max_model_len) for card in cards)

    return ClientCall([Post("/v1/models", None, new_id())], join)


def new_id() -> str:
    return uuid4().hex


def decode(reply: Reply, kind: type[CardsT]) -> CardsT:
    values = reply.content.count(b",")
    if values > MOST_VALUES:
        raise bad_answer(reply, f"{values} values, the limit is {MOST_VALUES}")
    try:
        return msgspec.json.decode(reply.content, type=kind)
    except UNREADABLE as error:  # which may quote the server
        raise bad_answer(reply, str(error)) from None


def bad_answer(reply: Reply, message: str) -> BadAnswer:
    return BadAnswer(f"an answer that cannot be used: {message}", reply.request_id)
