"""Errors as JSON, one shape everywhere."""

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpuscore.errors import GpuscoreError
from gpuscore.server.record import record_of


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct):
    error: ErrorBody


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )


def error_json(error: GpuscoreError) -> bytes:
    body = ErrorBody(error.message, error.type, error.param, error.code)
    return msgspec.json.encode(ErrorAnswer(body))


def error_headers(error: GpuscoreError) -> dict[str, str]:
    """Headers that belong to the error's status."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413, 431):
        headers["Connection"] = "close"  # the rest of the request is not going to be read
    return headers


def error_parts(
    error: GpuscoreError, request_id: str, timing: str | None
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Header fields and body, for a connection that answers by itself."""
    body = error_json(error)
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request_id.encode()),
    ]
    if error.retry_after is not None:
        fields.append((b"retry-after", b"%d" % error.retry_after))
    if timing is not None:
        fields.append((b"server-timing", timing.encode()))
    return fields, body


class _ErrorResponse(Response):
    """A response that notes its error in the request's record."""

    def __init__(self, error: GpuscoreError, headers: dict[str, str]) -> None:
        super().__init__(error_json(error), error.status, headers, "application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).refuse(self._error.status, self._error.code)
        await super().__call__(scope, receive, send)


def error_response(error: GpuscoreError, headers: dict[str, str] | None = None) -> Response:
    return _ErrorResponse(error, error_headers(error) | (headers or {}))
