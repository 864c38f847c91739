"""Errors as JSON, one shape everywhere."""

import msgspec
from starlette.responses import Response

from gpuscore.errors import GpuscoreError


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


def error_response(error: GpuscoreError, headers: dict[str, str] | None = None) -> Response:
    return Response(
        error_json(error),
        error.status,
        headers=error_headers(error) | (headers or {}),
        media_type="application/json",
    )
