"""One HTTP request and its answer, between a connection and the application (ASGI)."""

import asyncio
import logging
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Scope

from gpuscore.errors import GpuscoreError
from gpuscore.server.http.parser import RequestHead

logger = logging.getLogger(__name__)

HIGH_WATER = 2**16  # bytes of a body that nobody has asked for yet, before reading pauses
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSE = (b"connection", b"close")

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}

Fields = Iterable[tuple[bytes, bytes]]


def head_of(status: int, *fields: Fields) -> bytes:
    """An answer's head, from its status line to the empty line."""
    known = _STATUS_LINES.get(status)
    parts = [b"HTTP/1.1 %d \r\n" % status if known is None else known]
    for some in fields:
        for name, value in some:
            parts += (name, b": ", value, b"\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


def scope_of(head: RequestHead, addresses: tuple[Any, Any]) -> Scope:
    """A request's head as ASGI has it; `addresses` are the server's and the client's.

    The path is `read_target`'s and not decoded any further.
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


class Channel(Protocol):
    """What an exchange needs of its connection."""

    @property
    def default_fields(self) -> Fields: ...

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None:
        """Return once the client has taken most of what was written, or has left."""

    def regulate(self) -> None:
        """The exchange may take more, or has enough: read on, or pause."""

    def answered(self, exchange: "Exchange") -> None:
        """The answer's last byte was written."""


class Exchange:
    """The application's `receive` and `send`; the connection brings the body by `feed` and `end`.

    An answer's head waits for its body, so that both go out in one write.

    Args:
        channel: the connection.
        loop: the connection's.
        scope: the request's head as ASGI has it.
        keep_alive: whether the connection stays open after the answer.
        expects_continue: the client sends the body once it is told to.
        scoring: it is a POST to a dialect's path.
        tenant: whose it is, if it is scoring and has a valid key.
    """

    __slots__ = (
        *("scope", "keep_alive", "scoring", "tenant"),
        *("complete", "begun", "gone", "over", "written", "task", "_expects_continue"),
        *("_channel", "_loop", "_parts", "_unread", "_proceeds", "_delivered", "_error"),
        *("_waiter", "_start", "_running"),
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
        self.complete = False  # the whole request is here
        self.begun = False  # let in, or about to be in its turn
        self.gone = False  # the client has left, or somebody else has answered it
        self.over = False  # the answer is complete
        self.written = False  # some of the answer is
        self.task: asyncio.Task[None] | None = None
        self._channel, self._loop = channel, loop
        self._parts: list[bytes] = []
        self._unread = 0
        self._proceeds = False
        self._delivered = False  # the whole body, to the application
        self._error: GpuscoreError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._start: Message | None = None
        self._expects_continue = expects_continue
        self._running = False

    def begin(self) -> None:
        """It is let in, or about to be in its turn."""
        self.begun = True

    def close_after(self) -> None:
        """The connection ends with this answer."""
        self.keep_alive = False

    def start(self, app: ASGIApp) -> asyncio.Task[None]:
        self._proceeds = self.complete
        self.task = self._loop.create_task(self._run(app))
        return self.task

    def feed(self, data: bytes) -> None:
        """A part of the body. The application gets it when there is much of it, or by `proceed`."""
        self._unread += len(data)
        self._parts.append(data)
        if self.full:
            self._wake()

    @property
    def full(self) -> bool:
        """Whether no more of the body should come until the application has asked for it."""
        wanted = not (self.complete or self.over or self.gone)
        return wanted and self._unread > HIGH_WATER

    def proceed(self) -> None:
        """The body is complete, and it is the application's turn to have it."""
        self._proceeds = True
        self._wake()

    def refuse(self, error: GpuscoreError) -> None:
        """Let the application have this error instead of the body."""
        self._error = error
        self._wake()

    def leave(self) -> None:
        """Nobody waits for the answer any more: the application is cancelled."""
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
        if self.scope["method"] == "HEAD":
            body = b""
        if self._start is not None:
            body = self._head(self._start, more) + body
            self._start, self.written = None, True
        self._channel.write(body)
        if not more:
            self.over = True
            self._wake()
            self._channel.answered(self)

    def _head(self, start: Message, more: bool) -> bytes:
        fields = list(start.get("headers", ()))
        if more and all(name != b"content-length" for name, _ in fields):
            self.keep_alive = False  # the connection's end is the body's
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
                raise  # by the server that stops
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
