"""The ASGI application: routes, checks of keys and heads, and errors as JSON."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from time import monotonic
from typing import Any, TypeAlias, TypeVar, cast

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route, Router, request_response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuscore import __version__
from gpuscore.config import ServerConfig
from gpuscore.dialects.dialect import LARGE, BodyT, Dialect
from gpuscore.dialects.paths import OPEN_PATHS, no_such_path
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.dialects.wire import openapi_of
from gpuscore.errors import (
    AnswerTooLarge,
    DeadlineExceeded,
    GpuscoreError,
    InternalError,
    InvalidApiKey,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
)
from gpuscore.server.api.bodies import answer, check_content_type, count, error_response, read_body
from gpuscore.server.api.openapi import DocumentedApp
from gpuscore.server.api.pages import add_docs, add_metrics, add_pages, add_probes, add_ui
from gpuscore.server.http.aliases import read_aliases
from gpuscore.server.http.auth import NO_KEY, ApiKeys
from gpuscore.server.http.headers import (
    ANY_HOST,
    Hosts,
    check_request_id,
    head_refusal,
    read_origins,
    request_seconds,
)
from gpuscore.server.observe.operations import Operations, OperationsMiddleware
from gpuscore.server.service import ScoringService
from gpuscore.types.record import CLIENT_LEFT, LEFT_CODE, RequestRecord, record_of

logger = logging.getLogger(__name__)
AnswerT = TypeVar("AnswerT")
BYTES_PER_ID = 4
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


def create_app(
    service: ScoringService,
    config: ServerConfig,
    keys: ApiKeys,
    operations: Operations | None = None,
    hosts: Hosts = ANY_HOST,
) -> ASGIApp:
    """Return the ASGI application for the served models; by default with metrics but no log."""
    operations = operations or Operations(service)
    aliases = read_aliases(config)
    app = DocumentedApp(
        bool(keys),
        int(config.request_timeout * 1000),
        aliases,
        title="gpuscore",
        version=__version__,
        description="Label probabilities for many items, without decoding.",
        docs_url=None,  # FastAPI's page loads scripts from another host; see pages.py
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_dialects(app, service, config)
    add_probes(app, service)
    add_pages(app, service, aliases)
    add_metrics(app, operations)
    static = [*add_docs(app), *(add_ui(app) if config.ui else ())]
    _add_handlers(app)
    open_paths = {*OPEN_PATHS, *static}
    open_routes = [r for r in app.routes if getattr(r, "path", None) in open_paths]
    guarded = AuthMiddleware(app, app.router, open_routes, keys)
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    outer = OuterMiddleware(guarded, config, service, hosts)
    marked = read_origins(config).around(outer)
    return OperationsMiddleware(marked, operations, paths, config.timing_headers)


def create_metrics_app(
    service: ScoringService, config: ServerConfig, operations: Operations, hosts: Hosts
) -> ASGIApp:
    """Return the application of `--metrics-port`, which has only metrics and needs no key."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    add_metrics(app, operations)
    _add_handlers(app)
    outer = OuterMiddleware(app, config, service, hosts)
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    return OperationsMiddleware(outer, operations, paths, config.timing_headers)


def _add_handlers(app: FastAPI) -> None:
    app.add_exception_handler(GpuscoreError, _on_gpuscore_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_left)
    app.add_exception_handler(Exception, _on_bug)


def _add_dialects(app: FastAPI, service: ScoringService, config: ServerConfig) -> None:
    for path, dialect in DIALECT_OF.items():
        app.router.add_api_route(
            path,
            _endpoint(dialect, service, config),
            methods=["POST"],
            summary=dialect.summary,
            description=dialect.description,
            openapi_extra=openapi_of(dialect.bodies, dialect.answers, dialect.example),
            route_class_override=PlainRoute,
        )


def _endpoint(dialect: Dialect[Any], service: ScoringService, config: ServerConfig) -> Endpoint:
    async def answered(request: Request) -> Response:
        """Read, decode and answer a body within the request's timeout."""
        seconds = request_seconds(request, config.request_timeout)
        scope = request.scope
        check_content_type(request)
        if scope["state"].get("draining", service.draining):  # at the time of its head
            await read_body(request, config)  # otherwise the client would see a reset, no answer
            raise service.shutting_down()
        with service.in_flight():
            received = await read_body(request, config)
            record, size = record_of(scope), len(received)
            record.tenant = scope["state"]["tenant"]
            record.deadline = deadline = monotonic() + seconds
            try:
                if size < LARGE:
                    body = dialect.decode(received, record, None)
                else:
                    decoding = _decode_large(service, dialect, received, record)
                    body = await _in_time(decoding, deadline, seconds)
                del received  # it may be large, and `body` has the text
                reserve = partial(_reserve, scope, config.max_answer_bytes)
                running = answer(service, dialect, body, record, reserve)
                return await _in_time(running, deadline, seconds)
            finally:
                ids = BYTES_PER_ID * (record.prompt_tokens or 0)
                service.memory.used(max(size, ids))

    return answered


def _reserve(scope: Scope, limit: int, size: int) -> None:
    """Count an answer that may have `size` bytes; raise AnswerTooLarge or Overloaded."""
    if size > limit:
        raise AnswerTooLarge(f"the answer may have {size} bytes, the limit is {limit}")
    count(scope, size)


async def _decode_large(
    service: ScoringService, dialect: Dialect[BodyT], received: bytes, record: RequestRecord
) -> BodyT:
    limits = service.models.limits  # None if no model is loaded, and the answer is 503
    work = partial(dialect.decode, received, record, limits)
    return await service.in_thread(record.tenant, work, large=True)


async def _in_time(work: Coroutine[Any, Any, AnswerT], deadline: float, seconds: float) -> AnswerT:
    """Return the result of `work`, or cancel it at `deadline`.

    If the client leaves, the connection cancels the whole task.

    Raises:
        DeadlineExceeded: the deadline, which was `seconds` away at first, has passed.
    """
    task, late = asyncio.current_task(), False
    assert task is not None  # noqa: S101  (a handler runs in a task)

    def end() -> None:
        nonlocal late
        late = True
        task.cancel()

    # Like asyncio.timeout, with less overhead.
    timer = asyncio.get_running_loop().call_later(max(0.0, deadline - monotonic()), end)
    try:
        return await work
    except asyncio.CancelledError:
        if late and task.uncancel() == 0:
            raise DeadlineExceeded(f"no answer after {seconds:g} seconds") from None
        raise  # not cancelled by this timer
    finally:
        timer.cancel()


async def _on_gpuscore_error(request: Request, error: Exception) -> Response:
    return error_response(cast(GpuscoreError, error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Return the answer to an error of the router: 404, 405, or else 400."""
    refused = cast(HTTPException, error)
    known: dict[int, GpuscoreError] = {
        404: NotFound(no_such_path(request.scope["path"])),
        405: MethodNotAllowed("this path does not have that method"),
    }
    shown = known.get(refused.status_code, InvalidRequest("the request is malformed"))
    headers = dict(refused.headers or {})
    if headers.get("Allow") == "GET":
        headers["Allow"] = "GET, HEAD"  # see OuterMiddleware
    return error_response(shown, headers)


async def _on_client_left(request: Request, error: Exception) -> Response:
    """Note in the record that the client left; the response itself reaches nobody."""
    record_of(request.scope).refuse(CLIENT_LEFT, LEFT_CODE)
    return Response(status_code=CLIENT_LEFT)


async def _on_bug(request: Request, error: Exception) -> Response:
    return error_response(InternalError("internal error"))


class PlainRoute(APIRoute):
    """A route whose endpoint takes the request and returns the response.

    It appears in /openapi.json like any other, but skips FastAPI's dependency handling, which costs
    more than parsing a small request.
    """

    def __init__(self, path: str, endpoint: Endpoint, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.app = request_response(endpoint)


class OuterMiddleware:
    """The middleware that refuses bad heads and treats HEAD as GET; the connection sends no body.

    It also catches every exception that nothing else has caught: it logs the exception and answers
    500, so that the connection survives.
    """

    def __init__(
        self, app: ASGIApp, config: ServerConfig, service: ScoringService, hosts: Hosts
    ) -> None:
        self.app, self.config, self.service, self.hosts = app, config, service, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = self._closing(send)
        target = len(scope["raw_path"]) + len(scope["query_string"])
        refusal = head_refusal(scope["headers"], target, self.config)
        if refusal is not None:
            await error_response(refusal, {"Connection": "close"})(scope, receive, send)
            return
        try:
            self.hosts.check(scope["raw_path"], scope["headers"])
            check_request_id(scope)
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}
            await self.app(scope, receive, send)
        except ClientDisconnect:
            logger.debug("a client left before its answer")
        except GpuscoreError as error:
            await error_response(error)(scope, receive, send)
        except Exception:
            record = record_of(scope)
            logger.exception("unhandled error in request %s", record.request_id)
            if not record.status:  # otherwise _on_bug has answered
                await error_response(InternalError("internal error"))(scope, receive, send)

    def _closing(self, send: Send) -> Send:
        """Return a `send` that, while draining, asks the client to close the connection.

        The client's next request then goes to another server.
        """

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self.service.draining:
                kept = [pair for pair in message["headers"] if pair[0].lower() != b"connection"]
                message["headers"] = [*kept, (b"connection", b"close")]
            await send(message)

        return closing


class AuthMiddleware:
    """The middleware that passes a request on if its route is open or its key is valid.

    It decides by the route object that the router will use, never by a path that a Host header
    could have changed. A request that matches no route needs a key: its error is for the
    `OuterMiddleware`.
    """

    def __init__(
        self, app: ASGIApp, router: Router, open_routes: Collection[BaseRoute], keys: ApiKeys
    ) -> None:
        self.app, self.router, self.keys = app, router, keys
        self.open_routes = {id(route) for route in open_routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        # For a scoring request, the connection has checked the key before it read the body.
        tenant = state.get("tenant") or self.keys.tenant(scope["headers"])
        if tenant is None and not self._is_open(scope):
            raise InvalidApiKey("a valid API key is required: Authorization: Bearer KEY")
        state["tenant"] = tenant or NO_KEY
        await self.app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        for route in self.router.routes:
            if route.matches(scope)[0] == Match.FULL:
                return id(route) in self.open_routes
        return False
