"""Routes, and what surrounds them: keys, header limits, errors as JSON."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuscore import __version__
from gpuscore.config import ServerConfig
from gpuscore.errors import (
    DeadlineExceeded,
    GpuscoreError,
    HeaderTooLarge,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Unavailable,
)
from gpuscore.server.answers import error_response, json_response
from gpuscore.server.auth import ApiKeys, AuthMiddleware
from gpuscore.server.body import check_content_type, read_body
from gpuscore.server.schema import decode_body, openapi_body
from gpuscore.server.service import LOADING_RETRY_AFTER, ScoringService

logger = logging.getLogger(__name__)
AnswerT = TypeVar("AnswerT")

# Routes that need no key: probes, and pages that are the same for everyone.
OPEN_PATHS = ("/health", "/ready", "/docs", "/openapi.json")


def create_app(service: ScoringService, config: ServerConfig, keys: ApiKeys) -> ASGIApp:
    """The ASGI application of one served model."""
    app = FastAPI(
        title="gpuscore",
        version=__version__,
        description="Label probabilities for many items, without decoding.",
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
    )
    _add_routes(app, service, config)
    app.add_exception_handler(GpuscoreError, _on_gpuscore_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    open_routes = [r for r in app.routes if getattr(r, "path", None) in OPEN_PATHS]
    guarded = AuthMiddleware(app, app.router, open_routes, keys)
    return OuterMiddleware(guarded, config, service)


def _add_routes(app: FastAPI, service: ScoringService, config: ServerConfig) -> None:
    @app.post("/v1/score", summary="Score items", openapi_extra=openapi_body())
    async def score(request: Request) -> Response:
        """Probabilities of label tokens after each `query + item` prompt."""
        check_content_type(request)
        if service.draining:
            await read_body(request, config)  # or its sender would see a reset, not the answer
            raise service.shutting_down()
        with service.in_flight():
            body = decode_body(await read_body(request, config))
            work = service.score(body, request.scope["state"]["tenant"])
            return json_response(await _while_connected(request, work, config.request_timeout))

    @app.get("/health", summary="Process and engine alive")
    async def health() -> Response:
        if not service.healthy:
            raise Unavailable("the engine is not running", retry_after=LOADING_RETRY_AFTER)
        return json_response({"status": "ok"})

    @app.get("/ready", summary="Model loaded and warm")
    async def ready() -> Response:
        if not service.ready:
            raise Unavailable("not ready to score", retry_after=LOADING_RETRY_AFTER)
        return json_response({"status": "ready"})

    @app.get("/v1/models", summary="The served model")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model_card(service)]})


def _model_card(service: ScoringService) -> dict[str, Any]:
    card = {"id": service.names[0], "object": "model", "created": 0, "owned_by": "gpuscore"}
    if service.model is None:
        return card
    return card | {"max_model_len": service.model.engine.limits.max_model_len}


async def _while_connected(
    request: Request, work: Coroutine[Any, Any, AnswerT], seconds: float
) -> AnswerT:
    """Run `work`; cancel it when the client leaves or the time is up."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        done, _ = await asyncio.wait(
            {task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if task in done:
            return task.result()
        if gone in done:
            raise ClientDisconnect
        raise DeadlineExceeded(f"no answer after {seconds:g} seconds")
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _on_gpuscore_error(request: Request, error: Exception) -> Response:
    return error_response(cast(GpuscoreError, error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The router's own 404 and 405."""
    refused = cast(HTTPException, error)
    known: dict[int, GpuscoreError] = {
        404: NotFound("no such path"),
        405: MethodNotAllowed("this path does not have that method"),
    }
    shown = known.get(refused.status_code, InvalidRequest("the request is malformed"))
    return error_response(shown, dict(refused.headers or {}))


async def _on_bug(request: Request, error: Exception) -> Response:
    return error_response(InternalError("internal error"))


class OuterMiddleware:
    """Refuses bad heads, and is the last resort: what nobody caught is logged, the connection
    lives."""

    def __init__(self, app: ASGIApp, config: ServerConfig, service: ScoringService) -> None:
        self.app, self.config, self.service = app, config, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = self._closing(send)
        refusal = self._refusal(scope)
        if refusal is not None:
            await error_response(refusal, {"Connection": "close"})(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        except ClientDisconnect:
            logger.debug("a client left before its answer")
        except Exception:
            logger.exception("unhandled error")  # the 500 has been sent by _on_bug

    def _closing(self, send: Send) -> Send:
        """While draining, answers ask the client to come back on a connection to somebody else."""

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self.service.draining:
                kept = [pair for pair in message["headers"] if pair[0].lower() != b"connection"]
                message["headers"] = [*kept, (b"connection", b"close")]
            await send(message)

        return closing

    def _refusal(self, scope: Scope) -> GpuscoreError | None:
        """What is wrong with the request's head, if anything."""
        headers = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        size += len(scope["raw_path"]) + len(scope["query_string"])
        if len(headers) > self.config.max_headers or size > self.config.max_header_bytes:
            return HeaderTooLarge(
                f"the request head has {len(headers)} fields and {size} bytes, the limits are "
                f"{self.config.max_headers} and {self.config.max_header_bytes}"
            )
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            # Where a proxy in front believes the one and we the other, a body hides a request.
            return InvalidRequest("Content-Length and Transfer-Encoding exclude each other")
        return None
