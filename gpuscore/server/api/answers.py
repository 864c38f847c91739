"""Errors as JSON: one shape, to which /rerank adds what its clients read, and TEI's own."""

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpuscore.errors import GpuscoreError
from gpuscore.server.api.paths import FLAT_ERROR_PATHS
from gpuscore.server.observe.record import RequestRecord, record_of


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct, omit_defaults=True):
    error: ErrorBody
    detail: str | None = None  # read by Jina's and Infinity's clients
    message: str | None = None  # by Cohere's


class TeiError(msgspec.Struct):
    error: str
    error_type: str


_TEI_TYPES = {429: "Overloaded", 503: "Unhealthy"}


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )


def error_json(error: GpuscoreError, record: RequestRecord) -> bytes:
    """In the shape that the clients of the request's route read."""
    if record.tei:
        kind = _TEI_TYPES.get(error.status, "Validation" if error.status < 500 else "Backend")
        return msgspec.json.encode(TeiError(error.message, kind))
    body = ErrorBody(error.message, error.type, error.param, error.code)
    more = (error.message, error.message) if record.route in FLAT_ERROR_PATHS else ()
    return msgspec.json.encode(ErrorAnswer(body, *more))


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
    error: GpuscoreError, record: RequestRecord, timing: str | None
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Header fields and body, for a connection that answers by itself."""
    body = error_json(error, record)
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", record.request_id.encode()),
    ]
    if error.retry_after is not None:
        fields.append((b"retry-after", b"%d" % error.retry_after))
    if timing is not None:
        fields.append((b"server-timing", timing.encode()))
    return fields, body


class _ErrorResponse(Response):
    """A response that notes its error in the request's record, which also says its shape."""

    def __init__(self, error: GpuscoreError, headers: dict[str, str]) -> None:
        super().__init__(None, error.status, headers, "application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        record.refuse(self._error.status, self._error.code)
        self.body = error_json(self._error, record)
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: GpuscoreError, headers: dict[str, str] | None = None) -> Response:
    return _ErrorResponse(error, error_headers(error) | (headers or {}))
