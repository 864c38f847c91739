"""Bodies of requests and answers, with the steps that answer every dialect's requests.

A request's body is read up to a limit of bytes and never by the framework's parser.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from time import monotonic
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpuscore.config import ServerConfig
from gpuscore.dialects.dialect import (
    FRAME_BYTES,
    LARGE,
    BodyT,
    Dialect,
    PreparedBody,
    answered_name,
    choose,
    text_bytes,
)
from gpuscore.dialects.served import LoadedModel
from gpuscore.errors import (
    AnswerTooLarge,
    BodyTooLarge,
    DeadlineExceeded,
    InvalidRequest,
    NonfiniteScore,
    UnsupportedMediaType,
)
from gpuscore.server.http.gate import COUNT
from gpuscore.server.http.headers import request_seconds
from gpuscore.server.http.rounds import in_time
from gpuscore.server.service import ScoringService
from gpuscore.text.boundaries import announce
from gpuscore.types.item_errors import renumbered
from gpuscore.types.record import RESPOND, TOKENIZE, RequestRecord, record_of
from gpuscore.types.request import ScoreRequest, ScoreResult

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

JSON = "application/json"
IDENTITY = "identity"
GZIP = "gzip"
PIECE = 2**18  # most bytes that are unpacked before the event loop is free for others
WITH_GZIP = zlib.MAX_WBITS | 16  # zlib's flag for gzip's header and trailer


class Unpacker:
    """A reader of one body in gzip."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(WITH_GZIP)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield these bytes unpacked, at most PIECE bytes at a time.

        Raises:
            InvalidRequest: the bytes are not gzip's.
        """
        piece = b""
        # zlib may hold back what did not fit the last piece.
        while data or (piece and not self._inner.eof):
            if self._inner.eof:
                raise InvalidRequest("the body goes on after the end of its gzip data")
            try:
                piece = self._inner.decompress(data, PIECE)
            except zlib.error:
                raise InvalidRequest("the body is not valid gzip") from None
            data = self._inner.unconsumed_tail or self._inner.unused_data
            if piece:
                yield piece

    def check_ended(self) -> None:
        """Raise InvalidRequest if the body is not complete."""
        if not self._inner.eof:
            raise InvalidRequest("the body ends before its gzip data is complete")


def unpacker(fields: list[str]) -> Unpacker | None:
    """Return the reader of a body with these Content-Encoding fields; None if it is not packed.

    Raises:
        UnsupportedMediaType: the encoding is not supported, or there are several.
    """
    names = [name.strip().lower() for field in fields for name in field.split(",")]
    encodings = [name for name in names if name != IDENTITY]
    if encodings not in ([], [GZIP]):
        raise UnsupportedMediaType(f"the content encoding must be {IDENTITY} or {GZIP}")
    return Unpacker() if encodings else None


def check_content_type(request: Request) -> None:
    """Raise UnsupportedMediaType unless the head announces JSON in UTF-8, in a known encoding."""
    kind, *parameters = request.headers.get("content-type", "").lower().split(";")
    charset = [p.strip() for p in parameters if p.strip()]
    if kind.strip() != JSON or charset not in ([], ["charset=utf-8"]):
        raise UnsupportedMediaType(f"the content type must be {JSON}")
    unpacker(request.headers.getlist("content-encoding"))


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """Return the whole body, unpacked.

    The gate enforces the timeout and the limit of what is sent; the connection drops the rest of a
    body that was answered early.

    Raises:
        BodyTooLarge: more than `max_body_bytes` unpacked.
        InvalidRequest: the body is not in its content encoding.
        Overloaded: the bodies in flight exceed `max_queued_bytes`.
        ClientDisconnect: the client left.
    """
    limit = config.max_body_bytes
    reader = unpacker(request.headers.getlist("content-encoding"))
    parts = []
    size = 0
    async for part in request.stream():
        if reader is None:
            parts.append(part)
            continue
        for piece in reader.pieces(part):
            size += len(piece)
            if size > limit:
                raise BodyTooLarge(f"the unpacked body is over {limit} bytes")
            request.scope["state"][COUNT](len(piece))
            parts.append(piece)
            if len(piece) == PIECE:
                await asyncio.sleep(0)
    if reader is not None:
        reader.check_ended()
    return b"".join(parts)


def json_response(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type=JSON)


PIECE_SENT = 2**16  # bytes; a connection waits for its client once about so many are not taken


class InPieces(Response):
    """An answer that is sent piece by piece, as the client takes it. Joining the pieces would take
    the memory twice, and all threads would wait for it."""

    def __init__(
        self, pieces: Iterable[bytes], kind: str = JSON, headers: Mapping[str, str] | None = None
    ) -> None:
        self._pieces = [bytearray()]
        for piece in pieces:
            announce(len(piece))
            if len(self._pieces[-1]) >= PIECE_SENT:
                self._pieces.append(bytearray())
            self._pieces[-1] += piece
        size = sum(map(len, self._pieces))
        super().__init__(headers={"Content-Length": str(size), **(headers or {})}, media_type=kind)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        for piece in self._pieces:
            more = piece is not self._pieces[-1]
            await send({"type": "http.response.body", "body": piece, "more_body": more})


SMALL_ANSWER = 2**16  # bytes; up to here an answer is encoded on the event loop
MOST_PARTS = 128  # of a body at once; the engine's queue has room for 1,024 requests by default


async def answer(
    service: ScoringService,
    dialect: Dialect[BodyT],
    body: BodyT,
    record: RequestRecord,
    reserve: Callable[[int], None],
) -> Response:
    """Return the answer to a body.

    Args:
        reserve: called with the most bytes of the answer; raises AnswerTooLarge or Overloaded.

    Raises:
        GpuscoreError: the request is refused or has failed; each subclass is one code.
    """
    record.items = body.num_items
    served = choose(service.models, dialect, body)
    record.model = served.name
    model = served.ready()
    with record.stage(TOKENIZE):
        prepare = partial(_prepared, model, dialect, body)
        small = dialect.is_small(body)
        prepared, size = prepare() if small else await service.in_thread(record.tenant, prepare)
    name = answered_name(served, body)
    size += FRAME_BYTES + text_bytes(name)
    reserve(size)
    prepared.model = name
    prepared.record = record
    if prepared.parts:
        prepared.results = await _results(service, model, prepared, record)
    elif prepared.request is not None:
        try:
            prepared.result = await service.run(model, prepared.request, record)
        except NonfiniteScore as error:
            raise renumbered(error, prepared.scored_places) from error
    with nullcontext() if body.num_items is None else record.stage(RESPOND):
        if body.num_items is not None:
            record.prompt_tokens = prepared.prompt_tokens
            record.cached_tokens = prepared.cached_tokens
        if prepared.request is not None:
            record.label_tokens = prepared.request.num_label_tokens

        def encode() -> Response:
            return InPieces(dialect.encode(prepared))

        small = size <= SMALL_ANSWER
        return encode() if small else await service.in_thread(record.tenant, encode)


def _prepared(
    model: LoadedModel, dialect: Dialect[BodyT], body: BodyT
) -> tuple[PreparedBody[BodyT], int]:
    prepared = dialect.prepare(model, body)
    return prepared, dialect.answer_bytes(prepared)


async def _results(
    service: ScoringService, model: LoadedModel, prepared: PreparedBody[Any], record: RequestRecord
) -> list[ScoreResult]:
    """Return the results of all parts of a body, MOST_PARTS at once; the first error ends all."""
    places = asyncio.Semaphore(MOST_PARTS)

    async def run_part(request: ScoreRequest, items: Sequence[int]) -> ScoreResult:
        try:
            async with places:
                return await service.run(model, request, record)
        except NonfiniteScore as error:
            raise renumbered(error, items) from error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [*map(group.create_task, map(run_part, prepared.parts, prepared.places))]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def endpoint(dialect: Dialect[Any], service: ScoringService, config: ServerConfig) -> Endpoint:
    """Return the function that answers a dialect's requests."""

    async def answered(request: Request) -> Response:
        """Read, decode and answer a body within the request's timeout."""
        seconds = request_seconds(request, config.request_timeout)
        check_content_type(request)
        scope = request.scope

        def reserve(size: int) -> None:
            if size > (limit := config.max_answer_bytes):
                raise AnswerTooLarge(f"the answer may have {size} bytes, the limit is {limit}")
            scope["state"][COUNT](size)

        with service.in_flight():
            received = await read_body(request, config)
            record = record_of(scope)
            record.deadline = deadline = monotonic() + seconds
            late = partial(DeadlineExceeded, f"no answer after {seconds:g} seconds")
            if len(received) < LARGE:
                body = dialect.decode(received, record, None)
            else:
                limits = service.models.limits  # None if no model is loaded, and the answer is 503
                decode = partial(dialect.decode, received, record, limits)
                decoding = service.in_thread(record.tenant, decode, large=True)
                body = await in_time(decoding, deadline, late)
                del decode
            del received  # it may be large, and `body` has the text
            running = answer(service, dialect, body, record, reserve=reserve)
            return await in_time(running, deadline, late)

    return answered
