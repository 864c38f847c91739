"""The interface of a dialect, and the steps that answer every dialect's requests."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from gpuscore.errors import GpuscoreError, NonfiniteScore
from gpuscore.item_errors import ItemError, renumbered, scored_places
from gpuscore.request import ScoreRequest, ScoreResult
from gpuscore.server.api.errors import ErrorAnswer, encode_error
from gpuscore.server.api.pieces import FRAME_BYTES, next_part, text_bytes
from gpuscore.server.observe.record import RESPOND, TOKENIZE, RequestRecord
from gpuscore.server.served import LoadedModel, ModelTable, ServedModel
from gpuscore.server.service import RequestContext, ScoringService
from gpuscore.text.turns import ALONE, Turns

SMALL_ANSWER = 2**16  # bytes; up to here an answer is encoded on the event loop
LARGE_ANSWER = 10**6  # bytes; a larger answer is sent while it is made


class CheckedBody(Protocol):
    """The properties of every dialect's checked body."""

    @property
    def model(self) -> str | None: ...

    @property
    def num_items(self) -> int | None:
        """Number of items, documents or questions; None if nothing is scored."""


BodyT = TypeVar("BodyT", bound=CheckedBody)


@dataclass(frozen=True, slots=True)
class PreparedBody:
    """A body's request to the engine, and the data that the answer needs.

    Args:
        request: for the engine; None if it need not be asked.
        salt: the body's `cache_salt`.
        prompt_tokens: tokens of all prompts, for the usage; None if nothing is scored.
        notes: any other data that the dialect's `encode` needs.
        errors: the items that the request leaves out; None unless the body asked for that.
        label_tokens: tokens of labels that are items of the request, but of no prompt.
        parts: the same as several requests, for a caller that can run them at once; else empty.
        places: in the body, of the items of each of `parts`.
    """

    request: ScoreRequest | None
    salt: str | None = None
    prompt_tokens: int | None = None
    notes: Any = None
    errors: tuple[ItemError, ...] | None = None
    label_tokens: int = 0
    parts: tuple[ScoreRequest, ...] = ()
    places: Sequence[Sequence[int]] = ()

    @staticmethod
    def of(
        request: ScoreRequest | None,
        salt: str | None,
        notes: Any = None,
        errors: tuple[ItemError, ...] | None = None,
    ) -> "PreparedBody":
        """Return a body with the tokens of its request, which is None if there is no item."""
        tokens = 0 if request is None else request.num_prompt_tokens
        return PreparedBody(request, salt, tokens, notes, errors)


@dataclass(frozen=True, slots=True)
class Scored(Generic[BodyT]):
    """A body and the engine's result.

    Args:
        body: as `decode` returned it.
        prepared: as `prepare` returned it.
        result: None if the engine was not asked, or was asked for `prepared.parts`.
        model: the served model, by the name that the caller used, or else its own.
        request_id: for answers that have an id.
        path: the route to which the body was posted.
        parts: the results of `prepared.parts`, if the engine was asked for these.
    """

    body: BodyT
    prepared: PreparedBody
    result: ScoreResult | None
    model: str
    request_id: str
    path: str
    parts: Sequence[ScoreResult] = ()

    @property
    def request(self) -> ScoreRequest:
        """The engine's request; it and `scores` raise ValueError if the engine was not asked."""
        if self.prepared.request is None:
            raise ValueError("the engine was not asked")
        return self.prepared.request

    @property
    def scores(self) -> ScoreResult:
        if self.result is None:
            raise ValueError("the engine was not asked")
        return self.result

    @property
    def errors(self) -> tuple[ItemError, ...]:
        """The errors of the items that were left out."""
        return self.prepared.errors or ()

    @property
    def prompt_tokens(self) -> int:
        return self.prepared.prompt_tokens or 0

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that no forward pass computed for this request."""
        results = self.parts or (() if self.result is None else (self.result,))
        if not results:
            return 0
        computed = sum(result.computed_tokens for result in results)
        labels_apart = self.request.nodes is None
        tokens = self.request.num_prompt_tokens if labels_apart else self.prompt_tokens
        return max(0, tokens - computed)


def never(_: object) -> bool:
    return False


def nothing_more(body: object, model: LoadedModel | None) -> None:
    """Check nothing, for dialects whose `decode` checks everything."""


@dataclass(frozen=True, slots=True)
class MadeAnswer:
    """An answer as JSON: its first bytes, and the pieces that follow if it is a large one."""

    first: bytes
    rest: Iterator[bytes] | None = None


@dataclass(frozen=True, slots=True)
class Dialect(Generic[BodyT]):
    """The paths of a dialect, and the functions that read and answer its bodies.

    `decode`, `check`, `prepare` and `encode` are called in this order, the last three by `answer`.
    Small bodies are prepared, and small answers encoded, on the event loop, others in a thread.

    Args:
        paths: the routes of the dialect.
        summary: a few words, for /docs.
        description: a sentence, for /docs.
        bodies: types of the bodies, for /docs.
        answers: types of the answers, for /docs; empty for a route that is always refused.
        example: a body that the demo model answers, for /docs.
        decode: decodes a body and makes all checks that need no model. May set `variant` of the
            record. Raises InvalidRequest.
        check: makes the checks of fields that need the served model, which is None while it
            loads, and come before that of the model's name. Raises GpuscoreError.
        prepare: makes the engine's request; calls `Turns.before` before each piece of work on text.
            Raises GpuscoreError.
        encode: returns the answer as JSON, in pieces that each take about a millisecond to make
            (`pieces`). Only what comes before the first one may fail, and the pieces hold no more
            of the request than they need, because a client may take long to read them.
        answer_bytes: returns the most bytes that the answer can have, besides FRAME_BYTES and the
            model's name, for a body that is prepared.
        is_small: returns True if `prepare` takes no longer than handing the body to a thread.
        errors: types of the error bodies, for /docs.
        encode_error: returns an error as JSON, for the record's `variant`.
    """

    paths: tuple[str, ...]
    summary: str
    description: str
    bodies: tuple[type[msgspec.Struct], ...]
    answers: tuple[Any, ...]
    example: dict[str, Any]
    decode: Callable[[bytes, RequestRecord], BodyT]
    prepare: Callable[[LoadedModel, BodyT, Turns], PreparedBody]
    encode: Callable[[Scored[BodyT]], Iterator[bytes]]
    answer_bytes: Callable[[BodyT, PreparedBody], int]
    check: Callable[[BodyT, LoadedModel | None], None] = nothing_more
    is_small: Callable[[BodyT], bool] = never
    errors: tuple[type[msgspec.Struct], ...] = (ErrorAnswer,)
    encode_error: Callable[[GpuscoreError, str], bytes] = encode_error


def choose(models: ModelTable, dialect: Dialect[BodyT], body: BodyT) -> ServedModel:
    """Return the model that a body is for, once the dialect has checked the body's fields.

    Raises:
        GpuscoreError: a field is invalid, or there is no such model.
    """
    found = models.find(body.model) or models.only
    dialect.check(body, None if found is None else found.loaded)
    return models.choose(body.model)


def answered_name(served: ServedModel, body: CheckedBody) -> str:
    """Return the model's name for the answer: as the caller wrote it, or else its own."""
    return served.name if body.model is None else body.model


async def answer(
    service: ScoringService, dialect: Dialect[BodyT], body: BodyT, call: RequestContext
) -> MadeAnswer:
    """Return the answer to a body.

    Raises:
        GpuscoreError: the request is refused or has failed; each subclass is one code.
    """
    record = call.record
    record.items = body.num_items
    served = choose(service.models, dialect, body)
    record.model = served.name
    model = served.ready()
    with record.stage(TOKENIZE):
        if dialect.is_small(body):
            prepared, size = _prepared(model, dialect, body, ALONE)
        else:
            work = partial(_prepared, model, dialect, body)
            prepared, size = await service.in_turns(call, work)
    name = answered_name(served, body)
    size += FRAME_BYTES + text_bytes(name)
    call.reserve(size)
    result, parts = None, list[ScoreResult]()
    if prepared.parts:
        parts = await _results(service, model, prepared, call)
    elif prepared.request is not None:
        try:
            result = await service.run(model, prepared.request, prepared.salt, call)
        except NonfiniteScore as error:
            raise renumbered(error, scored_places(prepared.errors, body.num_items)) from error
    scored = Scored(body, prepared, result, name, record.request_id, call.path, parts)
    pieces = _encoded(partial(dialect.encode, scored))
    if prepared.prompt_tokens is None:
        return await _begun(service, call, pieces, size)
    with record.stage(RESPOND):
        record.prompt_tokens, record.cached_tokens = scored.prompt_tokens, scored.cached_tokens
        if prepared.request is not None:
            record.label_tokens = prepared.request.num_label_tokens + prepared.label_tokens
        del prepared, result, parts, scored
        return await _begun(service, call, pieces, size)


def _prepared(
    model: LoadedModel, dialect: Dialect[BodyT], body: BodyT, turns: Turns
) -> tuple[PreparedBody, int]:
    prepared = dialect.prepare(model, body, turns)
    return prepared, dialect.answer_bytes(body, prepared)


def _encoded(encode: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
    """Yield the pieces of an answer; the first one is asked for where the work is to be done."""
    pieces = encode()
    del encode  # it has the body
    yield from pieces


async def _begun(
    service: ScoringService, call: RequestContext, pieces: Iterator[bytes], size: int
) -> MadeAnswer:
    """Return the answer, whole up to LARGE_ANSWER; its size is at most `size`."""
    if size <= SMALL_ANSWER:
        return MadeAnswer(b"".join(pieces))
    made, length = list[bytes](), 0
    while length <= LARGE_ANSWER:
        part = await service.in_thread(call, partial(next_part, pieces))
        if part is None:
            return MadeAnswer(b"".join(made))
        made.append(part)
        length += len(part)
    return MadeAnswer(b"".join(made), pieces)


async def _results(
    service: ScoringService, model: LoadedModel, prepared: PreparedBody, call: RequestContext
) -> list[ScoreResult]:
    """Return the results of all parts of a body, which run at once; the first error ends all."""

    async def one(request: ScoreRequest, items: Sequence[int]) -> ScoreResult:
        try:
            return await service.run(model, request, prepared.salt, call)
        except NonfiniteScore as error:
            raise renumbered(error, items) from error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [*map(group.create_task, map(one, prepared.parts, prepared.places))]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
