"""The steps that answer every dialect's requests; JSON, which is sent while it is made if it is
large; and errors in the shape of the route's dialect.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpuscore.dialects.dialect import (
    FRAME_BYTES,
    BodyT,
    Dialect,
    PreparedBody,
    Scored,
    answered_name,
    choose,
    next_part,
    text_bytes,
)
from gpuscore.dialects.served import LoadedModel
from gpuscore.dialects.table import error_answer
from gpuscore.errors import GpuscoreError, NonfiniteScore, Unavailable
from gpuscore.server.service import RequestContext, ScoringService
from gpuscore.text.turns import ALONE, Turns
from gpuscore.types.item_errors import renumbered, scored_places
from gpuscore.types.record import RESPOND, TOKENIZE, record_of
from gpuscore.types.request import ScoreRequest, ScoreResult


def json_response(content: object) -> Response:
    return _json(msgspec.json.encode(content))


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


class _ErrorResponse(Response):
    """An ASGI response that answers with an error."""

    def __init__(self, error: GpuscoreError, headers: dict[str, str]) -> None:
        super().__init__(None, error.status, headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields, self.body = error_answer(self._error, record_of(scope))
        more = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self.raw_headers = fields + more
        await super().__call__(scope, receive, send)


class LongResponse(Response):
    """A JSON answer that is sent while it is made: each piece once the client has taken most of
    those before it.

    Nothing that makes a piece may fail. If the server is given up while it is sent, it ends early,
    and the connection with it.
    """

    def __init__(
        self, service: ScoringService, call: RequestContext, first: bytes, rest: Iterator[bytes]
    ) -> None:
        super().__init__(media_type="application/json")
        del self.headers["content-length"]
        self._service, self._call, self._first, self._rest = service, call, first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0
        part: bytes | None = self._first
        del self._first
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            with self._service.in_flight():
                while part is not None:
                    size += len(part)
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                    more = partial(next_part, self._rest)
                    part = await self._service.in_thread(self._call, more)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Unavailable:
            pass  # given up; what was sent shows that it is not complete
        finally:
            self._service.memory.used(size)


def error_response(error: GpuscoreError, headers: dict[str, str] | None = None) -> Response:
    # After these errors the rest of the request is not read.
    close = {"Connection": "close"} if error.status in (408, 413, 431) else {}
    return _ErrorResponse(error, close | (headers or {}))


SMALL_ANSWER = 2**16  # bytes; up to here an answer is encoded on the event loop
LARGE_ANSWER = 10**6  # bytes; a larger answer is sent while it is made


async def answer(
    service: ScoringService, dialect: Dialect[BodyT], body: BodyT, call: RequestContext
) -> Response:
    """Return the answer to a body as JSON, which is sent while it is made if it is a large one.

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
) -> Response:
    """Return the answer, whole up to LARGE_ANSWER; its size is at most `size`."""
    if size <= SMALL_ANSWER:
        return _json(b"".join(pieces))
    made, length = list[bytes](), 0
    while length <= LARGE_ANSWER:
        part = await service.in_thread(call, partial(next_part, pieces))
        if part is None:
            return _json(b"".join(made))
        made.append(part)
        length += len(part)
    return LongResponse(service, call, b"".join(made), pieces)


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
