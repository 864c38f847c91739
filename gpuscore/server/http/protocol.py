"""One HTTP/1.1 connection: uvicorn's protocol on llhttp, within limits of time and size.

llhttp alone parses. It refuses requests that could smuggle another one (both lengths, two lengths,
broken chunks), but it parses as much as it is given, stops at upgrades, and has no limits. So a
head is kept until it is complete, checked, freed of `Upgrade`, which RFC 9110 (7.8) lets a server
ignore, and then parsed at once. A body is parsed up to where it can end, and never past it: the
next request stays unparsed until this one is answered.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import Message, Receive, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from gpuscore.errors import GpuscoreError, HeaderTooLarge, RequestTimeout
from gpuscore.server.http.gate import BROKEN, CLOSE, Answer, Gate
from gpuscore.server.http.headers import END, body_length, check_beginning, invalid, readable

LINGER = 2.0  # seconds for a client that still sends after its last answer
SMALL_BODY = 2**16  # bytes; after a refusal, a larger body is not read: the connection is closed
# A connection parses at most this many heads and parts of bodies at once; then others get their
# turn. A part with many lines, as of chunks of one byte, has at most MANY bytes.
STEPS = 4
MANY = 2**12
LINES = 256
# What a connection waits for until its deadline. ANSWER has none: the application has deadlines of
# its own.
HEAD = "head"
IDLE = "idle"
REST = "rest"
ANSWER = "answer"
SEND = "send"  # the client must take most of what is written
# The connection is closing: it drops what arrives, or the client must take its last answer.
LINGERS = "lingers"
LAST = "last"

# The read buffer, which all connections share. Its size bounds one read, and so the bytes that a
# connection keeps unparsed.
_READ = memoryview(bytearray(2**16))


class ScoreProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """A connection that answers one request before it parses the next.

    Later bytes wait here, at most one read of them; the others stay with the client. The deadline
    of a head runs from the connection's opening, or from a later request's first byte.
    The server has at most `most` connections.
    """

    def __init__(self, *, gate: Gate, most: int, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._gate = gate
        self._most = most
        self._data = bytearray()  # not parsed yet
        self._searched = 0  # bytes of a head that has no end yet
        self._ended = False  # llhttp has ended a message
        self._in_body = False  # a body has not ended
        self._broken = False  # what arrives is not parsed any more
        self._left: int | None = None  # bytes of the body; None: it is in chunks
        self._around = 0  # bytes of the head, of chunks' extensions and of trailer fields
        self._spare = gate.config.max_body_bytes  # bytes that may be dropped after an answer
        self._needs = True  # more bytes are needed to go on
        self._queued = False  # in the turns of all connections
        self._start: Message | None = None  # of an answer, until its first part is there
        self._state = ANSWER
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    # The callbacks of asyncio and uvicorn.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._most:
            self._gate.operations.connections_refused += 1
            transport.abort()
            return
        super().connection_made(transport)
        # This connection itself decides when to read. Where uvicorn would resume reading, it wakes.
        self.flow.resume_reading = self.wake  # type: ignore[method-assign]
        self._await(HEAD, self._gate.config.client_timeout)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _READ

    def buffer_updated(self, nbytes: int) -> None:
        if self._broken or self._state == LINGERS:
            self._drop(nbytes)
        else:
            self._data += _READ[:nbytes]
            self._parse()

    def connection_lost(self, exc: Exception | None) -> None:
        if self not in self.connections:  # refused in `connection_made`
            return
        if self._busy and self._task is not None:
            self.loop.call_soon(self._task.cancel)  # it has begun by then, and leaves a record
        super().connection_lost(exc)
        self._await(ANSWER)  # without a timer
        self._data.clear()
        # They refer to this object, whose memory would stay until Python looks for cycles.
        self.flow = self.cycle = None  # type: ignore[assignment]

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._busy:
            self._await(SEND, self._gate.config.client_timeout)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._state == SEND:
            self._await(ANSWER)
        self._settle()

    # The callbacks of llhttp.

    def on_message_begin(self) -> None:
        if self._in_body:  # llhttp sees another end of the body than we do
            raise invalid()
        super().on_message_begin()
        self._ended = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # otherwise it is a trailer field, and those are dropped
            super().on_header(name, value.strip(b" \t"))

    def on_body(self, body: bytes) -> None:
        size = len(body)
        self._around -= size + 4 + (size.bit_length() + 3) // 4  # a chunk's line ends and digits
        if not self.cycle.response_complete:
            self.cycle.body += body

    def on_message_complete(self) -> None:
        self._ended = True
        super().on_message_complete()

    # From bytes to requests.

    @property
    def _busy(self) -> bool:  # a request is not answered
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _closing(self) -> bool:
        return self._state in (LINGERS, LAST) or self.transport.is_closing()

    @property
    def _may_parse(self) -> bool:
        """True if more bytes may be parsed: a head only if its request can be answered now."""
        if self._broken or self._closing:
            return False
        if self._in_body:
            return not self._busy or len(self.cycle.body) <= HIGH_WATER_LIMIT
        return not self._busy and not self.flow.write_paused

    def _ends_within(self, cycle: RequestResponseCycle, most: int) -> bool:
        """Return True if at most `most` bytes of the body are left, and the client sends them."""
        rest = self._left if self._in_body else 0
        return rest is not None and rest <= most and not cycle.waiting_for_100_continue

    def wake(self) -> None:
        """Parse waiting bytes in a later round; the application has taken some of a body."""
        if not self._needs and not self._queued:
            self._queued = True
            self._gate.turns.add(self._parse)

    def _parse(self) -> None:
        """Parse what has arrived, up to STEPS parts of it."""
        self._queued = self._needs = False
        try:
            for _ in range(STEPS):
                if self._data and not self._needs and self._may_parse:
                    self._needs = not (self._parse_body() if self._in_body else self._parse_head())
        except GpuscoreError as error:
            self._fail(error)
        self._needs = self._needs or not self._data
        self._settle()

    def _settle(self) -> None:
        """Decide what the connection waits for, and whether it reads."""
        if self._closing:
            return
        if not self._busy:
            state = REST if self._in_body else HEAD if self._data else IDLE
            seconds = self._gate.config.client_timeout
            if state == IDLE:
                seconds = self._gate.config.keep_alive_timeout
                self.cycle = self.scope = self.headers = None  # type: ignore[assignment]
            if self._state != state:  # otherwise its deadline is running
                self._await(state, seconds)
        if self._needs:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()
            if self._may_parse:
                self.wake()

    def _parse_head(self) -> bool:
        """Parse a head and begin with its request; return False if it is not complete."""
        data = self._data
        most = self._gate.config.max_header_bytes
        blank = len(data) - len(data.lstrip(b"\r\n"))  # between two requests
        end = data.find(END, max(blank, self._searched))
        size = len(data) if end < 0 else end + len(END)
        if size > most:
            raise HeaderTooLarge(f"the request head is over {most} bytes")
        if end < 0:
            check_beginning(data, self._searched)
            self._searched = max(0, len(data) - len(END) + 1)
            return False
        self._searched = 0
        self._around = size
        self.cycle = None  # type: ignore[assignment]  # until the head is parsed
        self._feed(size, readable)
        self._left = body_length(self.headers, self.scope["http_version"])
        if self.cycle is None or self._ended != (self._left == 0):
            raise invalid()
        self._begin()
        return True

    def _begin(self) -> None:
        """Refuse the request whose head was parsed, or start the application."""
        cycle = self.cycle
        self._in_body = not self._ended
        self._spare = self._gate.config.max_body_bytes
        if not self._in_body or self.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False
        self._await(ANSWER)
        answer = self._gate.refusal(cast(Scope, cycle.scope))
        if answer is None:
            self._task = self.loop.create_task(self._run(cycle))
            self.tasks.add(self._task)
            self._task.add_done_callback(self.tasks.discard)
            return
        if cycle.scope["method"] == "HEAD":
            answer = (*answer[:2], b"")
        keep_alive = cycle.keep_alive and self._ends_within(cycle, SMALL_BODY)
        cycle.keep_alive = self._write(answer, keep_alive)
        self._answered(cycle)

    def _parse_body(self) -> bool:
        """Parse a part of a body; return False if more bytes are needed."""
        data = self._data
        left = self._left
        if left is None:
            end = data.find(END)
            size = len(data) if end < 0 else end + len(END)
            if size > MANY and data.count(b"\n", 0, size) > LINES:
                size = MANY
                end = -1
            if end < 0:  # the last bytes stay if they may be the beginning of an END
                size -= next(n for n in (3, 2, 1, 0) if data.endswith(END[:n], 0, size))
            if not size:
                return False
        else:
            size = min(left, len(data))
            self._left = left = left - size
        self._around += size
        self._feed(size)
        if left is not None and self._ended != (left == 0):
            raise invalid()  # llhttp sees another end than we do
        if left is None and self._around > (most := self._gate.config.max_header_bytes):
            raise HeaderTooLarge(f"head, chunk extensions and trailer fields are over {most} bytes")
        self._in_body = not self._ended
        if self._busy:
            self.cycle.message_event.set()
        else:
            self._drop(size)
        return True

    def _feed(self, size: int, checked: Callable[[bytes], bytes] = bytes) -> None:
        """Have llhttp parse so many bytes; raise InvalidRequest if it cannot."""
        part = checked(bytes(memoryview(self._data)[:size]))
        del self._data[:size]
        try:
            self.parser.feed_data(part)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            raise invalid() from None

    # From answers to bytes.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: object) -> None:
        """Do nothing: `_begin` starts the application once the whole head is parsed."""

    async def _run(self, cycle: RequestResponseCycle) -> None:
        """Run the application; it is cancelled if the client leaves."""
        scope, receive = cast("tuple[Scope, Receive]", (cycle.scope, cycle.receive))
        try:
            await self._gate(scope, receive, partial(self._send, cycle))
        finally:
            if not cycle.response_complete and not cycle.disconnected:
                self.transport.abort()

    async def _send(self, cycle: RequestResponseCycle, message: Message) -> None:
        """Write a message of an answer with a Content-Length; its head waits for the body."""
        if cycle.disconnected:
            return
        if message["type"] == "http.response.start":
            cycle.keep_alive = cycle.keep_alive and self._ends_within(cycle, self._spare)
            cycle.waiting_for_100_continue = False
            self._start = message
            return
        body = b"" if cycle.scope["method"] == "HEAD" else message.get("body", b"")
        if self._start is None:
            self.transport.write(body)
        else:
            answer = self._start["status"], self._start["headers"], body
            self._start = None
            cycle.keep_alive = self._write(answer, cycle.keep_alive)
        if self.flow.write_paused:
            await self.flow.drain()  # the request counts until the client has taken most of it
        if not message.get("more_body", False):
            self._answered(cycle)
            self._settle()

    def _answered(self, cycle: RequestResponseCycle) -> None:
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._close()

    def _fail(self, error: GpuscoreError) -> None:
        """End the connection after an error of its bytes, with an answer if one is due."""
        self._broken = self._needs = True
        self._data.clear()
        self._spare = SMALL_BODY
        if self._in_body and self._busy:
            self.cycle.keep_alive = self.cycle.more_body = False
            # Without its traceback, whose frames hold the bytes and this connection.
            cast(Scope, self.cycle.scope)["state"][BROKEN] = error.with_traceback(None)
            self.cycle.message_event.set()
            return
        if not self._in_body:
            unknown = {"type": "http", "method": "", "path": "", "headers": [], "state": {}}
            self._write(self._gate.refused(unknown, error), False)
        self._close()

    def _write(self, answer: Answer, keep_alive: bool) -> bool:
        """Write a head and some of a body; return whether the connection stays open after them."""
        status, fields, body = answer
        closes = CLOSE in fields
        parts = [STATUS_LINE[status]]
        for name, value in (*self.server_state.default_headers, *fields):
            parts += (name, b": ", value, b"\r\n")
        if not keep_alive and not closes:
            parts.append(b"connection: close\r\n")
        parts += (b"\r\n", body)
        self.transport.write(b"".join(parts))
        return keep_alive and not closes

    def _close(self) -> None:
        """Close once all is sent. If the client still sends, end only our side at first: closing a
        socket with unread bytes resets the connection, and an answer on its way would be lost."""
        if self._closing:
            return
        if not (self._in_body or self._broken):
            self.transport.close()
            self._await(LAST, self._gate.config.client_timeout)
            return
        try:
            self.transport.write_eof()
        except OSError:  # the client has left
            self.transport.abort()
        self.transport.resume_reading()
        self._await(LINGERS, LINGER)

    def _drop(self, size: int) -> None:
        """Count bytes that are dropped, and close the connection if they are too many."""
        self._spare -= size
        if self._spare < 0:
            self.transport.close()

    def _await(self, state: str, seconds: float | None = None) -> None:
        """Set what the connection waits for, and for how many seconds; None = no limit."""
        self._state = state
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        seconds = self._gate.config.client_timeout
        if self._state == HEAD:
            late = f"the request head was not complete after {seconds:g} seconds"
            self._fail(RequestTimeout(late))
            self._settle()
        elif self._state == LINGERS:
            self.transport.close()
            self._await(LAST, seconds)
        else:
            self.transport.abort()
