"""The ASGI application: the routes behind the gate, and the work of those that have a dialect."""

from collections.abc import Awaitable, Callable
from functools import cache, partial
from time import monotonic
from typing import Any, TypeAlias

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import Scope

from gpuscore import __version__
from gpuscore.config import ServerConfig
from gpuscore.dialects.dialect import LARGE, BodyT, Dialect
from gpuscore.dialects.paths import OPEN_PATHS
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.dialects.wire import openapi_of
from gpuscore.errors import AnswerTooLarge, DeadlineExceeded
from gpuscore.server.api.bodies import answer, check_content_type, read_body
from gpuscore.server.api.openapi import complete
from gpuscore.server.api.pages import add_files, add_metrics, add_pages, add_probes
from gpuscore.server.http.aliases import read_aliases
from gpuscore.server.http.gate import COUNT, Gate
from gpuscore.server.http.headers import ApiKeys, request_seconds
from gpuscore.server.http.rounds import Rounds, in_time
from gpuscore.server.observe.operations import Operations
from gpuscore.server.service import ScoringService
from gpuscore.types.record import RequestRecord, record_of

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


def create_app(
    service: ScoringService,
    config: ServerConfig,
    keys: ApiKeys,
    operations: Operations | None = None,
    hosts: frozenset[str] | None = None,
    rounds: Rounds | None = None,
) -> Gate:
    """Return the ASGI application for the served models; by default with metrics but no log."""
    operations = operations or Operations(service)
    aliases = read_aliases(config)
    app = FastAPI(
        title="gpuscore",
        version=__version__,
        description="Label probabilities for many items, without decoding.",
        docs_url=None,  # FastAPI's page loads scripts from another host; see pages.py
        redoc_url=None,
    )
    app.router.route_class = PlainRoute
    _add_dialects(app, service, config)
    add_probes(app, service)
    add_pages(app, service, aliases)
    add_metrics(app, operations)
    longest = int(config.request_timeout * 1000)
    plain = app.openapi
    described = cache(lambda: complete(plain(), bool(keys), longest, aliases))
    app.openapi = described  # type: ignore[method-assign]
    open_paths = {*OPEN_PATHS, *add_files(app, config.ui)}
    return Gate(app, config, keys, operations, hosts, open_paths, rounds)


def _add_dialects(app: FastAPI, service: ScoringService, config: ServerConfig) -> None:
    for path, dialect in DIALECT_OF.items():
        app.router.add_api_route(
            path,
            _endpoint(dialect, service, config),
            methods=["POST"],
            summary=dialect.summary,
            description=dialect.description,
            openapi_extra=openapi_of(dialect.bodies, dialect.answers, dialect.example),
        )


def _endpoint(dialect: Dialect[Any], service: ScoringService, config: ServerConfig) -> Endpoint:
    async def answered(request: Request) -> Response:
        """Read, decode and answer a body within the request's timeout."""
        seconds = request_seconds(request, config.request_timeout)
        check_content_type(request)
        scope = request.scope
        with service.in_flight():
            received = await read_body(request, config)
            record = record_of(scope)
            record.deadline = deadline = monotonic() + seconds
            late = partial(DeadlineExceeded, f"no answer after {seconds:g} seconds")
            if len(received) < LARGE:
                body = dialect.decode(received, record, None)
            else:
                decoding = _decode_large(service, dialect, received, record)
                body = await in_time(decoding, deadline, late)
            del received  # it may be large, and `body` has the text
            reserve = partial(_reserve, scope, config.max_answer_bytes)
            running = answer(service, dialect, body, record, reserve=reserve)
            return await in_time(running, deadline, late)

    return answered


def _reserve(scope: Scope, limit: int, size: int) -> None:
    """Count an answer that may have `size` bytes; raise AnswerTooLarge or Overloaded."""
    if size > limit:
        raise AnswerTooLarge(f"the answer may have {size} bytes, the limit is {limit}")
    scope["state"][COUNT](size)


async def _decode_large(
    service: ScoringService, dialect: Dialect[BodyT], received: bytes, record: RequestRecord
) -> BodyT:
    limits = service.models.limits  # None if no model is loaded, and the answer is 503
    work = partial(dialect.decode, received, record, limits)
    return await service.in_thread(record.tenant, work, large=True)


class PlainRoute(APIRoute):
    """A route whose endpoint takes the request and returns the response.

    It appears in /openapi.json like any other, but skips FastAPI's dependency handling, which costs
    more than parsing a small request.
    """

    def __init__(self, path: str, endpoint: Endpoint, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.app = request_response(endpoint)
