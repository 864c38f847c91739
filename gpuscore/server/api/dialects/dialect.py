"""The interface of a dialect, and the steps that answer every dialect's requests."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from gpuscore.errors import GpuscoreError, NonfiniteScore
from gpuscore.item_errors import ItemError, renumbered, scored_places
from gpuscore.request import ScoreRequest, ScoreResult
from gpuscore.server.api.errors import ErrorAnswer, encode_error
from gpuscore.server.observe.record import RESPOND, TOKENIZE, RequestRecord
from gpuscore.server.served import LoadedModel, ModelTable, ServedModel
from gpuscore.server.service import SMALL_ITEMS, RequestContext, ScoringService
from gpuscore.text.turns import ALONE, Turns


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


def has_few_items(scored: Scored[Any]) -> bool:
    return (scored.body.num_items or 0) <= SMALL_ITEMS


@dataclass(frozen=True, slots=True)
class Dialect(Generic[BodyT]):
    """The paths of a dialect, and the functions that read and answer its bodies.

    `decode`, `check`, `prepare` and `encode` are called in this order, the last three by `answer`.
    Small bodies are prepared and encoded on the event loop, all others in a thread.

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
        encode: returns the answer as JSON.
        is_small: returns True if `prepare` takes no longer than handing the body to a thread.
        has_small_answer: returns True if `encode` takes no longer than that.
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
    encode: Callable[[Scored[BodyT]], bytes]
    check: Callable[[BodyT, LoadedModel | None], None] = nothing_more
    is_small: Callable[[BodyT], bool] = never
    has_small_answer: Callable[[Scored[BodyT]], bool] = has_few_items
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
) -> bytes:
    """Return the answer to a body as JSON.

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
            prepared = dialect.prepare(model, body, ALONE)
        else:
            prepared = await service.in_turns(call, partial(dialect.prepare, model, body))
    result, parts = None, list[ScoreResult]()
    if prepared.parts:
        parts = await _results(service, model, prepared, call)
    elif prepared.request is not None:
        try:
            result = await service.run(model, prepared.request, prepared.salt, call)
        except NonfiniteScore as error:
            raise renumbered(error, scored_places(prepared.errors, body.num_items)) from error
    name = answered_name(served, body)
    scored = Scored(body, prepared, result, name, record.request_id, call.path, parts)
    if prepared.prompt_tokens is None:
        return dialect.encode(scored)
    with record.stage(RESPOND):
        record.prompt_tokens, record.cached_tokens = scored.prompt_tokens, scored.cached_tokens
        if prepared.request is not None:
            record.label_tokens = prepared.request.num_label_tokens + prepared.label_tokens
        if dialect.has_small_answer(scored):
            return dialect.encode(scored)
        return await service.in_thread(call, partial(dialect.encode, scored))


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
