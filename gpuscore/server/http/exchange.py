"""One HTTP request and its answer, between a connection and the application (ASGI)."""

import asyncio
import logging
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Scope

from gpuscore.dialects.table import error_answer
from gpuscore.errors import GpuscoreError
from gpuscore.server.http.parser import RequestHead
from gpuscore.types.record import RequestRecord

logger = logging.getLogger(__name__)

HIGH_WATER = 2**16  # bytes of a body that the application has not read yet, before reading pauses
MORE = "more"  # in the scope's state: counts bytes that the connection does not see (`Gate.more`)
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSE = (b"connection", b"close")

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}

Fields = Iterable[tuple[bytes, bytes]]


def head_of(status: int, *fields: Fields) -> bytes:
    """Return an answer's head, from its status line to the empty line."""
    known = _STATUS_LINES.get(status)
    parts = [b"HTTP/1.1 %d \r\n" % status if known is None else known]
    for some in fields:
        for name, value in some:
            parts += (name, b": ", value, b"\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


def error_reply(
    record: RequestRecord, error: GpuscoreError, keep_alive: bool, *more: Fields
) -> bytes:
    """Return an error's answer for a request that the application does not see; `more` are fields
    of its head."""
    fields, body = error_answer(error, record)
    fields.append((b"x-request-id", record.request_id.encode()))
    record.bytes_out = len(body)
    head = head_of(error.status, *more, fields, () if keep_alive else (CLOSE,))
    return head if record.method == "HEAD" else head + body


def scope_of(head: RequestHead, addresses: tuple[Any, Any]) -> Scope:
    """Return a request's head as an ASGI scope; `addresses` are the server's and the client's.

    The path is as `read_target` returned it, not decoded any further.
    """
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": head.version,
        "server": addresses[0],
        "client": addresses[1],
        "scheme": "http",
        "method": head.method.decode("latin-1"),
        "root_path": "",
        "path": head.path,
        "raw_path": head.target.partition(b"?")[0],
        "query_string": head.query,
        "headers": head.fields,
        "state": {},
    }


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


class Channel(Protocol):
    """The methods of a connection that its exchange calls."""

    @property
    def default_fields(self) -> Fields: ...

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None:
        """Return once the client has taken most of the written bytes, or has left."""

    def regulate(self) -> None:
        """Pause or resume reading, depending on whether the exchange has room for more body."""

    def answered(self, exchange: "Exchange") -> None:
        """Take note that the answer's last byte was written."""


class Exchange:
    """One request and its answer, with the application's `receive` and `send`.

    The connection passes the body on by `feed` and `proceed`. An answer's head is held back until
    its body is there, so that both go out in one write.

    Args:
        channel: the connection.
        loop: the connection's event loop.
        scope: the request's head as an ASGI scope.
        keep_alive: whether the connection stays open after the answer.
        expects_continue: the client waits for "100 Continue" before it sends the body.
        scoring: the request is a POST to a dialect's path.
        tenant: the owner of the request's key; empty unless the request is scoring and its key is
            valid.
    """

    __slots__ = (
        *("scope", "keep_alive", "scoring", "tenant"),
        *("complete", "begun", "gone", "over", "written", "task", "_expects_continue"),
        *("_channel", "_loop", "_parts", "_unread", "_proceeds", "_delivered", "_error"),
        *("_waiter", "_start", "_running", "_chunked"),
    )

    def __init__(
        self,
        channel: Channel,
        loop: asyncio.AbstractEventLoop,
        scope: Scope,
        *,
        keep_alive: bool,
        expects_continue: bool,
        scoring: bool,
        tenant: str,
    ) -> None:
        self.scope, self.keep_alive = scope, keep_alive
        self.scoring, self.tenant = scoring, tenant
        self.complete = False  # the whole request has arrived
        self.begun = False  # its work was started, or it waits in the gate's queue to be started
        self.gone = False  # the client has left, or the connection itself has answered
        self.over = False  # the whole answer was written
        self.written = False  # the first part of the answer was written
        self.task: asyncio.Task[None] | None = None
        self._channel, self._loop = channel, loop
        self._parts: list[bytes] = []
        self._unread = 0
        self._proceeds = False
        self._delivered = False  # the application has received the whole body
        self._error: GpuscoreError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._start: Message | None = None
        self._chunked = False  # the answer's length is not known when it begins
        self._expects_continue = expects_continue
        self._running = False

    def begin(self) -> None:
        """Mark the request as handed over to be started."""
        self.begun = True

    def close_after(self) -> None:
        """Have the connection closed after this answer."""
        self.keep_alive = False

    def start(self, app: ASGIApp) -> asyncio.Task[None]:
        self._proceeds = self.complete
        self.task = self._loop.create_task(self._run(app))
        return self.task

    def feed(self, data: bytes) -> None:
        """Add a part of the body.

        The application gets the body when more than HIGH_WATER bytes are there, or by `proceed`.
        """
        self._unread += len(data)
        self._parts.append(data)
        if self.full:
            self._wake()

    @property
    def full(self) -> bool:
        """True if the connection should stop reading until the application takes the body."""
        wanted = not (self.complete or self.over or self.gone)
        return wanted and self._unread > HIGH_WATER

    def proceed(self) -> None:
        """Let the application receive the body, which is complete."""
        self._proceeds = True
        self._wake()

    def refuse(self, error: GpuscoreError) -> None:
        """Make the application's next `receive` raise this error instead of returning the body."""
        self._error = error
        self._wake()

    def leave(self) -> None:
        """Cancel the application, because the answer can no longer be sent."""
        if self.gone or self.over:
            return
        self.gone = True
        self._parts.clear()
        if self._running and self.task is not None:
            self.task.cancel()
        self._wake()

    async def receive(self) -> Message:
        if self._expects_continue and not self.complete and not self.gone:
            self._channel.write(CONTINUE)
            self._expects_continue = False
        while self._error is None and self._unread <= HIGH_WATER and not self._has_end:
            if self.gone or self.over:
                return {"type": "http.disconnect"}
            self._channel.regulate()
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._error is not None:
            error, self._error, self._delivered = self._error, None, True
            raise error
        if self.gone:
            return {"type": "http.disconnect"}
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self._unread = [], 0
        self._delivered = self._proceeds
        return {"type": "http.request", "body": body, "more_body": not self._proceeds}

    @property
    def _has_end(self) -> bool:
        return self._proceeds and not self._delivered

    async def send(self, message: Message) -> None:
        await self._channel.drain()
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        head = b""
        if self._start is not None:
            head = self._head(self._start, more)
            self._start, self.written = None, True
        if self.scope["method"] == "HEAD":
            body = b""
        elif self._chunked:
            body = _chunk(body) + (b"" if more else LAST_CHUNK)
        self._channel.write(head + body)
        if not more:
            self.over = True
            self._wake()
            self._channel.answered(self)

    def _head(self, start: Message, more: bool) -> bytes:
        fields = list(start.get("headers", ()))
        if more and all(name != b"content-length" for name, _ in fields):
            if self.scope["http_version"] == "1.0":
                self.keep_alive = False  # the body ends where the connection ends
            else:
                self._chunked = True
                fields.append((b"transfer-encoding", b"chunked"))
        if CLOSE in fields:
            self.keep_alive = False
        elif not self.keep_alive:
            fields.append(CLOSE)
        return head_of(start["status"], self._channel.default_fields, fields)

    async def _run(self, app: ASGIApp) -> None:
        self._running = True
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            if not self.gone:
                raise  # the server itself is stopping
        except Exception:
            logger.exception("the application failed")
        finally:
            self._running = False
            if not self.over and not self.gone:
                self.gone = True
                self._channel.answered(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
