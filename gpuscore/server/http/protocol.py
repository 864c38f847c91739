"""One HTTP/1.1 connection: deadlines, limits, refusals, and one request at a time for the
application. uvicorn owns the listener and the connections."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.server import ServerState

from gpuscore.config import ServerConfig
from gpuscore.errors import GpuscoreError, Overloaded, RequestTimeout
from gpuscore.server.http.exchange import MORE, Exchange, Fields, error_reply, scope_of
from gpuscore.server.http.gate import Gate
from gpuscore.server.http.headers import Origins, head_refusal
from gpuscore.server.http.parser import NO_ALIASES, RequestHead, RequestParser
from gpuscore.server.http.timing import Deadline, Departure, Outlet, Postponed, Remainder
from gpuscore.server.observe.operations import Operations, server_timing
from gpuscore.types.record import UNMATCHED, Headers, RequestRecord, new_record, record_of

KEEP_ALIVE = 5.0  # seconds that a connection may be idle
LINGER = 2.0  # seconds for a client that still sends after its last answer
SMALL_BODY = 2**16  # bytes; after a refusal, a larger body is not read: the connection is closed
# A connection parses at most this many spans at once; then other connections get their turn.
SPANS = 4

# The read buffer, which all connections share. Its size bounds one read, and so the bytes that a
# connection keeps unparsed.
_READ = memoryview(bytearray(2**16))


class ScoreProtocol(asyncio.BufferedProtocol):
    """A connection that answers one request before it parses the next.

    Later bytes wait here, at most one read of them; the others stay with the client. The deadline
    of a head runs from the connection's opening, or from a later request's first byte; the deadline
    of a body runs from the end of its head.
    """

    _transport: asyncio.Transport
    _outlet: Outlet

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        server_config: ServerConfig,
        operations: Operations,
        gate: Gate,
        turns: Postponed,
        origins: Origins,
        aliases: Mapping[str, str] = NO_ALIASES,
    ) -> None:
        if not config.loaded:
            config.load()
        self._app: ASGIApp = config.loaded_app
        self._state, self._config = server_state, server_config
        self._operations, self._gate, self._turns = operations, gate, turns
        self._origins = origins
        self._loop = _loop or asyncio.get_running_loop()
        self._open = False  # accepted, and not lost
        self._addresses: tuple[Any, Any] = (None, None)
        self._parser = RequestParser(self, server_config.max_header_bytes, aliases)
        self._exchange: Exchange | None = None  # being read or answered
        self._closing = False  # the last answer was written, but the client still sends
        self._used = False  # there was at least one request
        self._paused = False
        self._stalled = False  # unparsed bytes wait for the answer in progress, or for `_turns`
        self._queued = False  # in `_turns`
        self._looked = -1  # the round in which the gate was last asked
        self._unsent: list[Exchange] = []  # answered, but the client has not taken most of it
        self._departure: Departure | None = None  # set once the client has closed its side
        self._deadline = Deadline(self._loop, self._late)
        self._remainder = Remainder(self._loop, server_config.max_body_bytes, self.regulate)

    # The callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        if not self._gate.connect():
            self._operations.refuse_connection()
            transport.abort()
            return
        self._transport, self._open = transport, True
        self._outlet = Outlet(self._loop, transport, self._config.send_timeout)
        self._state.connections.add(self)  # type: ignore[arg-type]  # a union of uvicorn's own
        local, remote = map(transport.get_extra_info, ("sockname", "peername"))
        self._addresses = local and local[:2], remote and remote[:2]
        self._deadline.set(self._config.header_timeout)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _READ

    def buffer_updated(self, nbytes: int) -> None:
        idle = self._exchange is None and self._parser.in_head and not self._parser.begun
        self._parser.feed(_READ[:nbytes])
        self._remainder.took(nbytes)
        if idle and self._used and not self._closing:
            self._deadline.set(self._config.header_timeout)
        self._get_on()

    def eof_received(self) -> bool:
        """Return True, which keeps the connection open, if the client may wait for an answer."""
        exchange = self._exchange
        if exchange is None or not exchange.complete:
            return False
        exchange.close_after()
        self._parser.stop()
        self._departure = Departure(self._loop, self._transport, exchange)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        if not self._open:  # refused in `connection_made`
            return
        self._open = False
        self._gate.disconnect()
        self._state.connections.discard(self)
        self._deadline.close()
        self._parser.stop()
        self._remainder.end()
        if self._departure is not None:
            self._departure.close()
        self._outlet.close()
        self._release()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._abandon(exchange)

    def pause_writing(self) -> None:
        self._outlet.fill()

    def resume_writing(self) -> None:
        self._outlet.empty()
        self._release()
        if self._stalled:
            self._later()

    def shutdown(self) -> None:
        """Answer the request in progress, then close; uvicorn calls this before it ends."""
        if self._exchange is not None:
            self._exchange.close_after()
        elif self._open:
            self._transport.close()

    # The callbacks of the parser.

    def on_head(self, head: RequestHead) -> None:
        self._used = True
        scoring = head.method == b"POST" and head.path in self._gate.scoring
        tenant = self._gate.tenant(head.fields) if scoring else None
        length = head.length or 0
        if tenant is not None and length <= self._config.max_body_bytes:  # else the app answers
            refusal = self._gate.refusal(tenant, length)
            self._looked = self._gate.round
            if refusal is not None and self._turn_away(head, tenant, refusal):
                return
        self._exchange = Exchange(
            self,
            self._loop,
            self._scope(head, tenant),
            keep_alive=head.keep_alive,
            expects_continue=head.expects_continue,
            scoring=scoring,
            tenant=tenant or "",
        )
        if scoring:
            self._exchange.scope["state"][MORE] = partial(self._gate.more, self._exchange)
        self._deadline.set(self._config.body_timeout)

    def on_part(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None or exchange.over or exchange.gone:
            return
        if self._gate.size(exchange) <= self._config.max_body_bytes:  # bytes beyond are not kept
            refusal = self._gate.received(exchange, len(data))
            if refusal is not None:
                exchange.refuse(refusal)
        exchange.feed(data)

    def on_end(self) -> None:
        exchange = self._exchange
        self._remainder.end()
        if exchange is not None:
            self._deadline.clear()
            exchange.complete = True
            if exchange.begun:  # otherwise `_begin` follows
                self._admit(exchange, exchange.proceed)
        elif self._closing:  # the end of a body that was dropped
            self._transport.close()
        else:
            self._await_request()

    # The channel of an exchange.

    @property
    def default_fields(self) -> Fields:
        return self._state.default_headers

    def write(self, data: bytes) -> None:
        self._outlet.write(data)

    async def drain(self) -> None:
        await self._outlet.drain()

    def regulate(self) -> None:
        """Pause or resume reading, depending on whether there is room for more."""
        if self._departure is not None or not self._open:
            return  # no more bytes can arrive
        full = self._stalled or self._remainder.resting
        full = full or (self._exchange is not None and self._exchange.full)
        if full and not self._paused:
            self._transport.pause_reading()
        elif self._paused and not full:
            self._transport.resume_reading()
        self._paused = full

    def answered(self, exchange: Exchange) -> None:
        if self._open and self._outlet.full:  # counted until the client has taken most of it
            self._unsent.append(exchange)
        else:
            self._gate.leave(exchange)
        self._state.total_requests += 1
        if self._exchange is not exchange:
            return  # the connection is lost
        self._exchange = None
        if exchange.gone:  # without a complete answer
            self._transport.abort()
        elif not exchange.complete:
            self._discard(exchange.keep_alive)
        elif not exchange.keep_alive:
            self._transport.close()
        elif self._parser.left:
            self._deadline.clear()
            self._later()
        else:
            self._await_request()
        self.regulate()

    # From the parser to an exchange.

    @property
    def _has_room(self) -> bool:
        """True if more bytes may be parsed: a body always, a head only if its request can be
        answered now."""
        if self._transport.is_closing():
            return False
        return not self._parser.in_head or (self._exchange is None and not self._outlet.full)

    def _get_on(self) -> None:
        """Parse up to SPANS spans; the rest waits for a later round, or until there is room."""
        more, spans = True, SPANS
        try:
            while more and spans and self._has_room:
                more, spans = self._parser.step(), spans - 1
        except GpuscoreError as error:
            self._refuse(error)
        self._stalled = more and self._parser.left > 0
        if self._stalled and self._has_room:
            self._later()
        if self._exchange is not None and not self._exchange.begun:
            self._begin(self._exchange)
        self.regulate()

    def _later(self) -> None:
        """Continue parsing in a later round."""
        if not self._queued:
            self._queued = True
            self._turns.add(self._take_turn)

    def _take_turn(self) -> None:
        self._queued = False
        if not self._open:
            return
        self._get_on()
        if self._exchange is None and not self._stalled and not self._deadline.is_set:
            self._await_request()

    def _await_request(self) -> None:
        begun = self._parser.begun
        self._deadline.set(self._config.header_timeout if begun else KEEP_ALIVE)

    def _begin(self, exchange: Exchange) -> None:
        """Start a request once its head is parsed, and any body that arrived with it."""
        exchange.begin()
        if exchange.complete:
            self._admit(exchange, lambda: self._start(exchange))
        else:
            self._start(exchange)

    def _admit(self, exchange: Exchange, proceed: Callable[[], None]) -> None:
        """Ask the gate about a request whose body is complete, and call `proceed`."""
        looked = self._looked == self._gate.round  # in this round, when its head was parsed
        refusal, size = None, self._gate.size(exchange)
        if exchange.scoring and not looked and size <= self._config.max_body_bytes:
            refusal = self._gate.refusal(exchange.tenant, 0, size)
        if refusal is not None:
            exchange.refuse(refusal)
        if exchange.scoring and refusal is None:
            self._gate.enter(exchange, proceed)
        else:
            proceed()

    def _start(self, exchange: Exchange) -> None:
        if not exchange.gone:
            task = exchange.start(self._app)
            self._state.tasks.add(task)
            task.add_done_callback(self._state.tasks.discard)

    def _discard(self, keep_alive: bool) -> None:
        """Drop the rest of a request that was answered early; unread bytes would cause a reset."""
        self._closing = not keep_alive
        self._remainder.begin()
        self.regulate()
        if self._closing:
            self._deadline.set(LINGER)

    def _release(self) -> None:
        """Stop counting answers that waited for the client to take them."""
        for exchange in self._unsent:
            self._gate.leave(exchange)
        self._unsent.clear()

    def _turn_away(self, head: RequestHead, tenant: str, error: Overloaded) -> bool:
        """Refuse a request at its head; return False if it must get another error instead."""
        record = new_record(head.method, head.fields)
        bad = head_refusal(head.fields, len(head.target), self._config)
        if record.bad_request_id or bad is not None:
            return False
        record.route, record.tenant = head.path, tenant
        length = head.length
        keep_alive = head.keep_alive and length is not None and length <= SMALL_BODY
        keep_alive = keep_alive and not head.values(b"expect")
        self._write_error(record, error, head.fields, keep_alive)
        self._operations.finish(record, head.fields)
        self._deadline.set(self._config.body_timeout)
        self._discard(keep_alive)
        return True

    def _refuse(self, error: GpuscoreError) -> None:
        """Answer the request being read with an error, unless it was answered, and close."""
        if self._transport.is_closing():
            return
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            if not exchange.written:
                fields = exchange.scope["headers"]
                self._write_error(record_of(exchange.scope), error, fields, False)
            self._abandon(exchange)
        elif self._parser.in_head and not self._closing:
            seen = self._parser.seen
            record = new_record(seen.method, seen.fields)
            record.route = seen.path if seen.path in self._gate.scoring else UNMATCHED
            self._write_error(record, error, seen.fields, False)
            self._operations.finish(record, seen.fields)
        self._transport.close()

    def _write_error(
        self, record: RequestRecord, error: GpuscoreError, asked: Headers, keep_alive: bool
    ) -> None:
        """Write an error's answer; `asked` are the request's header fields."""
        marks = self._origins.fields(asked)
        if self._config.timing_headers:
            marks.append((b"server-timing", server_timing(record).encode()))
        self.write(error_reply(record, error, keep_alive, self.default_fields, marks))

    def _abandon(self, exchange: Exchange) -> None:
        """Give up a request whose answer can no longer be sent."""
        self._gate.leave(exchange)
        exchange.leave()
        if exchange.task is None:  # the application never saw it, so it is recorded here
            record = record_of(exchange.scope)
            record.route = exchange.scope["path"] if exchange.scoring else UNMATCHED
            self._operations.finish(record, exchange.scope["headers"])

    def _scope(self, head: RequestHead, tenant: str | None) -> Scope:
        """Return the ASGI scope, whose state has the request's record and, if known, its tenant."""
        scope = scope_of(head, self._addresses)
        scope["state"]["tenant"] = tenant
        scope["state"]["draining"] = self._gate.draining
        record_of(scope)
        return scope

    def _late(self) -> None:
        """End the connection when its deadline has passed, with 408 if a request was incomplete."""
        if self._transport.is_closing():
            return
        head, body = self._config.header_timeout, self._config.body_timeout
        if self._exchange is not None:
            self._refuse(RequestTimeout(f"the body was not complete after {body:g} seconds"))
        elif self._parser.in_head and not self._closing and (self._parser.begun or not self._used):
            late = RequestTimeout(f"the request head was not complete after {head:g} seconds")
            self._refuse(late)
        else:  # idle, or still sending a body that is dropped
            self._transport.close()
