"""One HTTP/1.1 connection: deadlines, caps, refusals, and requests handed to the application one
after the other. uvicorn owns the listener and the connections."""

import asyncio
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.server import ServerState

from gpuscore.config import ServerConfig
from gpuscore.errors import GpuscoreError, Overloaded, RequestTimeout
from gpuscore.server.api.answers import error_answer
from gpuscore.server.api.cors import Origins
from gpuscore.server.api.dialects.table import DIALECT_OF
from gpuscore.server.http.deadline import Deadline
from gpuscore.server.http.exchange import CLOSE, Exchange, Fields, head_of, scope_of
from gpuscore.server.http.gate import Gate
from gpuscore.server.http.headers import head_refusal
from gpuscore.server.http.leaving import Departure
from gpuscore.server.http.parser import RequestHead, RequestParser
from gpuscore.server.http.rounds import Postponed
from gpuscore.server.http.sending import Outlet
from gpuscore.server.observe.operations import Operations, server_timing
from gpuscore.server.observe.record import UNMATCHED, Headers, RequestRecord, new_record, record_of

KEEP_ALIVE = 5.0  # seconds that a connection may be idle
LINGER = 2.0  # seconds for a client that still sends although it was answered for good
SMALL_BODY = 2**16  # bytes; after a refusal, a larger body is not read for the connection's sake
# A connection gets on by so many spans of `framing` at once; then the others have their turn.
SPANS = 4

# What one read brings at most, and with it what a connection keeps unparsed. All connections read
# into it, one after the other.
_READ = memoryview(bytearray(2**16))


class ScoreProtocol(asyncio.BufferedProtocol):
    """Answers one request before it parses the next: what comes behind it waits, at most one read,
    and then in the client's own memory.

    The deadline of a head runs from the connection's opening, or from a later request's first byte;
    that of a body from the end of its head.
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
    ) -> None:
        if not config.loaded:
            config.load()
        self._app: ASGIApp = config.loaded_app
        self._state, self._config = server_state, server_config
        self._operations, self._gate, self._turns = operations, gate, turns
        self._origins = origins
        self._loop = _loop or asyncio.get_running_loop()
        self._open = False  # let in, and not lost
        self._addresses: tuple[Any, Any] = (None, None)
        self._parser = RequestParser(self, server_config.max_header_bytes)
        self._exchange: Exchange | None = None  # being read, or answered
        self._closing = False  # answered for good, but the client still sends
        self._used = False  # whether there was a request
        self._paused = False
        self._stalled = False  # what came in waits for an answer, or for a turn
        self._queued = False  # for a turn
        self._looked = -1  # the round in which the gate was last asked
        self._unsent: list[Exchange] = []  # answered, but much of it waits for the client
        self._departure: Departure | None = None  # the client has closed its side
        self._deadline = Deadline(self._loop, self._late)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        if len(self._state.connections) >= self._config.max_connections:
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
        if idle and self._used and not self._closing:
            self._deadline.set(self._config.header_timeout)
        self._get_on()

    def eof_received(self) -> bool:
        """True keeps the connection: the client may wait for its answer."""
        exchange = self._exchange
        if exchange is None or not exchange.complete:
            return False
        exchange.close_after()
        self._parser.stop()
        self._departure = Departure(self._loop, self._transport, exchange)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        if not self._open:  # turned away
            return
        self._open = False
        self._state.connections.discard(self)
        self._deadline.close()
        self._parser.stop()
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
        """uvicorn is about to end: answer what is under way, then close."""
        if self._exchange is not None:
            self._exchange.close_after()
        elif self._open:
            self._transport.close()

    # What the parser calls.

    def on_head(self, head: RequestHead) -> None:
        self._used = True
        scoring = head.method == b"POST" and head.path in DIALECT_OF
        tenant = self._gate.tenant(head.fields) if scoring else None
        length = head.length or 0
        if tenant is not None and length <= self._config.max_body_bytes:  # else that is the answer
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
        self._deadline.set(self._config.body_timeout)

    def on_part(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None or exchange.over or exchange.gone:
            return
        if self._gate.size(exchange) <= self._config.max_body_bytes:  # beyond it nobody keeps them
            refusal = self._gate.received(exchange, len(data))
            if refusal is not None:
                exchange.refuse(refusal)
        exchange.feed(data)

    def on_end(self) -> None:
        exchange = self._exchange
        if exchange is not None:
            self._deadline.clear()
            exchange.complete = True
            if exchange.begun:  # else `_begin` comes
                self._admit(exchange, exchange.proceed)
        elif self._closing:  # the end of a body that nobody wanted
            self._transport.close()
        else:
            self._await_request()

    # What an exchange calls.

    @property
    def default_fields(self) -> Fields:
        return self._state.default_headers

    def write(self, data: bytes) -> None:
        self._outlet.write(data)

    async def drain(self) -> None:
        await self._outlet.drain()

    def regulate(self) -> None:
        """Read if there is room for more."""
        if self._departure is not None or not self._open:
            return  # there is no more
        full = self._stalled or (self._exchange is not None and self._exchange.full)
        if full and not self._paused:
            self._transport.pause_reading()
        elif self._paused and not full:
            self._transport.resume_reading()
        self._paused = full

    def answered(self, exchange: Exchange) -> None:
        if self._open and self._outlet.full:  # it takes up memory until most of it is taken
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

    # Between the two.

    @property
    def _has_room(self) -> bool:
        """Whether what came in may be parsed: a body always, the next request once it can be
        answered."""
        if self._transport.is_closing():
            return False
        return not self._parser.in_head or (self._exchange is None and not self._outlet.full)

    def _get_on(self) -> None:
        """Parse some of what came in; what is left waits for its turn, or until there is room."""
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
        """Get on in a later round."""
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
        """Its head is here, and what came in with it."""
        exchange.begin()
        if exchange.complete:
            self._admit(exchange, lambda: self._start(exchange))
        else:
            self._start(exchange)

    def _admit(self, exchange: Exchange, proceed: Callable[[], None]) -> None:
        """Its body is complete."""
        looked = self._looked == self._gate.round  # at its head, just now
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
        """Read what is left of a request that was answered, or its sender sees a reset."""
        self._closing = not keep_alive
        self.regulate()
        if self._closing:
            self._deadline.set(LINGER)

    def _release(self) -> None:
        """What waited for the client takes up no memory any more."""
        for exchange in self._unsent:
            self._gate.leave(exchange)
        self._unsent.clear()

    def _turn_away(self, head: RequestHead, tenant: str, error: Overloaded) -> bool:
        """Refuse at the head, unless the request deserves another answer."""
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
        """Answer the request that is being read, if it was not answered, and close."""
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
            record.route = seen.path if seen.path in DIALECT_OF else UNMATCHED
            self._write_error(record, error, seen.fields, False)
            self._operations.finish(record, seen.fields)
        self._transport.close()

    def _write_error(
        self, record: RequestRecord, error: GpuscoreError, asked: Headers, keep_alive: bool
    ) -> None:
        """`asked` are the fields of the request."""
        fields, body = error_answer(error, record)
        fields.append((b"x-request-id", record.request_id.encode()))
        if self._config.timing_headers:
            fields.append((b"server-timing", server_timing(record).encode()))
        record.bytes_out = len(body)
        close = () if keep_alive else (CLOSE,)
        marks = self._origins.fields(asked)
        head = head_of(error.status, self.default_fields, fields, marks, close)
        self.write(head if record.method == "HEAD" else head + body)

    def _abandon(self, exchange: Exchange) -> None:
        """Nobody waits for its answer any more."""
        self._gate.leave(exchange)
        exchange.leave()
        if exchange.task is None:  # nor does the application know of it
            record = record_of(exchange.scope)
            record.route = exchange.scope["path"] if exchange.scoring else UNMATCHED
            self._operations.finish(record, exchange.scope["headers"])

    def _scope(self, head: RequestHead, tenant: str | None) -> Scope:
        """As ASGI has it, with the request's record and whose it is, as far as that is known."""
        scope = scope_of(head, self._addresses)
        scope["state"]["tenant"] = tenant
        scope["state"]["draining"] = self._gate.draining
        record_of(scope)
        return scope

    def _late(self) -> None:
        """The deadline is over."""
        if self._transport.is_closing():
            return
        head, body = self._config.header_timeout, self._config.body_timeout
        if self._exchange is not None:
            self._refuse(RequestTimeout(f"the body was not complete after {body:g} seconds"))
        elif self._parser.in_head and not self._closing and (self._parser.begun or not self._used):
            late = RequestTimeout(f"the request head was not complete after {head:g} seconds")
            self._refuse(late)
        else:  # idle, or it sends what nobody wants
            self._transport.close()
