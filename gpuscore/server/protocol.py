"""uvicorn's HTTP/1.1 protocol with what it lacks: a deadline for heads, a cap on connections, and
its own error answers as JSON."""

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpuscore.config import ServerConfig
from gpuscore.errors import GpuscoreError, HeaderTooLarge, InvalidRequest, RequestTimeout
from gpuscore.server.answers import error_headers, error_json
from gpuscore.server.operations import Operations
from gpuscore.server.record import record_of


class ScoreProtocol(H11Protocol):
    """One connection. The deadline runs from its opening, or from a later request's first byte,
    to the end of the request's head."""

    def __init__(
        self, *args: Any, server_config: ServerConfig, operations: Operations, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._server_config, self._operations = server_config, operations
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._server_config.max_connections:
            self._operations.connections_refused += 1
            transport.abort()
            return
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self.transport is not None:  # None: turned away in connection_made
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._start_timer()
        else:
            self._stop_timer()

    def send_400_response(self, msg: str) -> None:
        """Called where h11 has refused what the client sent."""
        refusal = sys.exc_info()[1]
        if getattr(refusal, "error_status_hint", 400) == 431:
            limit = self._server_config.max_header_bytes
            self._refuse(HeaderTooLarge(f"the request head is over {limit} bytes"))
        else:
            self._refuse(InvalidRequest("the request is not valid HTTP"))

    def _start_timer(self) -> None:
        if self._head_timer is None:
            seconds = self._server_config.header_timeout
            self._head_timer = self.loop.call_later(seconds, self._head_too_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            seconds = self._server_config.header_timeout
            self._refuse(
                RequestTimeout(f"the request head was not complete after {seconds:g} seconds")
            )

    def _refuse(self, error: GpuscoreError) -> None:
        """Answer and close, unless an answer is already under way."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error_json(error)
            headers = error_headers(error) | {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                "Connection": "close",
                "X-Request-Id": self._note(error),
            }
            response = h11.Response(status_code=error.status, headers=list(headers.items()))
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _note(self, error: GpuscoreError) -> str:
        """Tell the operator of a refusal; returns the id of the request, if it is one."""
        if self.cycle is None or self.cycle.response_complete:
            return self._operations.refused(error)
        record = record_of(self.cycle.scope)  # type: ignore[arg-type]  # a TypedDict of uvicorn's
        record.refuse(error.status, error.code)
        # The application is still at it: it is told that the client has left, which it will.
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        return record.request_id
