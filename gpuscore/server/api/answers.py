"""Answers of the application: JSON, and errors in the shape of the route's dialect."""

from collections.abc import Iterator
from functools import partial

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpuscore.dialects.dialect import next_part
from gpuscore.dialects.table import error_answer
from gpuscore.errors import GpuscoreError, Unavailable
from gpuscore.server.service import RequestContext, ScoringService
from gpuscore.types.record import record_of


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )


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
