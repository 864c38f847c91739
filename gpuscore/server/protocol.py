"""One HTTP/1.1 connection: deadlines, caps, refusals, and requests handed to the application in
order. uvicorn owns the listener and the connections."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.server import ServerState

from gpuscore.config import ServerConfig
from gpuscore.errors import GpuscoreError, Overloaded, RequestTimeout
from gpuscore.server.answers import error_parts
from gpuscore.server.deadline import Deadline
from gpuscore.server.dialects.table import DIALECT_OF
from gpuscore.server.exchange import CLOSE, Exchange, Fields, head_of, scope_of
from gpuscore.server.gate import Gate
from gpuscore.server.heads import head_refusal
from gpuscore.server.operations import Operations, server_timing
from gpuscore.server.parser import Head, RequestParser
from gpuscore.server.record import UNMATCHED, RequestRecord, new_record, record_of

KEEP_ALIVE = 5.0  # seconds that a connection may be idle
LINGER = 2.0  # seconds for a client that still sends although it was answered for good
SMALL_BODY = 2**16  # bytes; after a refusal, a larger body is not read for the connection's sake

_SCORING = {path.encode(): path for path in DIALECT_OF}


class ScoreProtocol(asyncio.Protocol):
    """The deadline of a head runs from the connection's opening, or from a later request's first
    byte; that of a body from the end of its head."""

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
    ) -> None:
        if not config.loaded:
            config.load()
        self._app: ASGIApp = config.loaded_app
        self._state, self._config = server_state, server_config
        self._operations, self._gate = operations, gate
        self._loop = _loop or asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._addresses: tuple[Any, Any] = (None, None)
        self._parser = RequestParser(self, server_config.max_header_bytes)
        self._exchanges: deque[Exchange] = deque()  # the first is being answered
        self._reading: Exchange | None = None  # whose body comes in; None: nobody wants it
        self._failure: GpuscoreError | None = None  # to be answered after those exchanges
        self._closing = False  # answered for good, but the client still sends
        self._used = False  # whether there was a request
        self._paused = False
        self._looked = -1  # the round in which the gate was last asked
        self._drained: asyncio.Future[None] | None = None  # while the client takes no answers
        self._unsent: list[Exchange] = []  # answered, but much of it waits for the client
        self._sent = 0  # bytes, to the client or the buffer before it
        self._sending: asyncio.TimerHandle | None = None  # while that buffer is not empty
        self._deadline = Deadline(self._loop, self._late)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        if len(self._state.connections) >= self._config.max_connections:
            self._operations.connections_refused += 1
            transport.abort()
            return
        self._transport = transport
        self._state.connections.add(self)  # type: ignore[arg-type]  # a union of uvicorn's own
        local, remote = map(transport.get_extra_info, ("sockname", "peername"))
        self._addresses = local and local[:2], remote and remote[:2]
        self._deadline.set(self._config.header_timeout)

    def data_received(self, data: bytes) -> None:
        if self._failure is not None:
            return
        idle = not self._exchanges and self._parser.in_head and not self._parser.begun
        try:
            self._parser.feed(data)
        except GpuscoreError as error:
            self._fail(error)
        if idle and self._used and self._parser.in_head and self._parser.begun:
            self._deadline.set(self._config.header_timeout)
        if self._exchanges and self._exchanges[0].task is None:
            self._begin(self._exchanges[0])

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is None:  # turned away
            return
        self._state.connections.discard(self)
        self._deadline.close()
        if self._sending is not None:
            self._sending.cancel()
        self.resume_writing()
        for exchange in self._exchanges:
            self._abandon(exchange)
        self._exchanges.clear()

    def pause_writing(self) -> None:
        if self._drained is None:
            self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None
        for exchange in self._unsent:
            self._gate.leave(exchange)
        self._unsent.clear()

    def shutdown(self) -> None:
        """uvicorn is about to end: answer what is under way, then close."""
        if self._exchanges:
            self._exchanges[0].keep_alive = False
        elif self._transport is not None:
            self._transport.close()

    # What the parser calls.

    def on_head(self, head: Head) -> None:
        self._used = True
        scoring = head.method == b"POST" and head.path in _SCORING
        tenant = self._gate.tenant(head.fields) if scoring else None
        if tenant is not None and not self._exchanges:
            refusal = self._gate.refusal(tenant, head.length or 0)
            self._looked = self._gate.round
            if refusal is not None and self._turn_away(head, tenant, refusal):
                return
        scope = self._scope(head)
        exchange = Exchange(self, self._loop, scope, head.keep_alive)
        exchange.expects_continue = b"100-continue" in map(bytes.lower, head.values(b"expect"))
        exchange.scoring, exchange.tenant = scoring, tenant or ""
        self._exchanges.append(exchange)
        self._reading = exchange
        if len(self._exchanges) == 1:
            self._deadline.set(self._config.body_timeout)
        else:
            self.pause_reading()  # until it is this one's turn

    def on_part(self, data: bytes) -> None:
        exchange = self._reading
        if exchange is None or exchange.over or exchange.gone:
            return
        if exchange.size <= self._config.max_body_bytes:  # beyond it nobody keeps them
            refusal = self._gate.received(exchange, len(data))
            if refusal is not None:
                exchange.refuse(refusal)
        exchange.feed(data)

    def on_end(self) -> None:
        exchange, self._reading = self._reading, None
        if exchange is None:  # a body that nobody wanted
            if self._closing and self._transport is not None:
                self._transport.close()
            elif not self._exchanges:
                self._deadline.set(KEEP_ALIVE)
            return
        self._deadline.clear()
        exchange.complete = True
        if len(self._exchanges) == 1:
            self.resume_reading()  # or a client that leaves would not be seen
        if exchange.task is not None:  # else `_begin` comes
            self._admit(exchange, exchange.proceed)

    # What an exchange calls.

    @property
    def default_fields(self) -> Fields:
        return self._state.default_headers

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
            self._sent += len(data)
            if self._sending is None and self._transport.get_write_buffer_size():
                self._watch_sending(self._transport)

    async def drain(self) -> None:
        while self._drained is not None:
            await asyncio.shield(self._drained)

    def pause_reading(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def answered(self, exchange: Exchange) -> None:
        if self._drained is None:
            self._gate.leave(exchange)
        else:  # it takes up memory until the client has taken most of it
            self._unsent.append(exchange)
        self._state.total_requests += 1
        if not self._exchanges or self._exchanges[0] is not exchange or self._transport is None:
            return  # the connection is lost
        self._exchanges.popleft()
        if exchange.gone:  # without a complete answer
            self._transport.abort()
        elif not exchange.complete:
            self._discard(exchange.keep_alive)
        elif not exchange.keep_alive:
            self._transport.close()
        else:
            self._go_on()

    # Between the two.

    def _watch_sending(self, transport: asyncio.Transport) -> None:
        """Look once more later, and drop a client that has taken nothing of its answer by then.

        Also of a connection that is being closed: its transport waits for the client for ever.
        """
        taken = self._sent - transport.get_write_buffer_size()

        def look() -> None:
            self._sending = None
            left = transport.get_write_buffer_size()
            if left and self._sent - left <= taken:
                transport.abort()
            elif left:
                self._watch_sending(transport)

        self._sending = self._loop.call_later(self._config.send_timeout, look)

    def _begin(self, exchange: Exchange) -> None:
        """It is the first of the exchanges, and its head is here."""
        if exchange.complete:
            self._admit(exchange, lambda: self._start(exchange))
        else:
            self._start(exchange)

    def _admit(self, exchange: Exchange, proceed: Callable[[], None]) -> None:
        """Its body is complete."""
        looked = self._looked == self._gate.round  # at its head, just now
        refusal = None
        if exchange.scoring and not looked:
            refusal = self._gate.refusal(exchange.tenant, 0, exchange.size)
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

    def _go_on(self) -> None:
        """The first exchange is over, and its request was complete."""
        if self._failure is not None and not self._exchanges:
            self._refuse(self._failure)
            return
        if len(self._exchanges) <= 1:
            self.resume_reading()
        if self._exchanges:
            if not self._exchanges[0].complete:
                self._deadline.set(self._config.body_timeout)
            self._begin(self._exchanges[0])
        else:
            self._deadline.set(self._config.header_timeout if self._parser.begun else KEEP_ALIVE)

    def _discard(self, keep_alive: bool) -> None:
        """Read what is left of a request that was answered, or its sender sees a reset."""
        self._reading = None
        self._closing = not keep_alive
        self.resume_reading()
        if self._closing:
            self._deadline.set(LINGER)

    def _turn_away(self, head: Head, tenant: str, error: Overloaded) -> bool:
        """Refuse at the head, unless the request deserves another answer."""
        record = new_record(head.method, head.fields)
        bad = head_refusal(head.fields, len(head.target), self._config)
        if record.bad_request_id or bad is not None:
            return False
        record.route, record.tenant = _SCORING[head.path], tenant
        length = head.length
        keep_alive = head.keep_alive and length is not None and length <= SMALL_BODY
        keep_alive = keep_alive and not head.values(b"expect")
        self._write_error(record, error, keep_alive)
        self._operations.finish(record, head.fields)
        self._deadline.set(self._config.body_timeout)
        self._discard(keep_alive)
        return True

    def _fail(self, error: GpuscoreError) -> None:
        """The connection cannot go on; what came before gets its answers."""
        self._failure, reading = error, self._reading
        self.pause_reading()
        if len(self._exchanges) > 1 and reading is not None:
            self._abandon(self._exchanges.pop())
        elif reading is not None or not self._exchanges:
            self._refuse(error)

    def _refuse(self, error: GpuscoreError) -> None:
        """Answer the request that is being read, if it was not answered, and close."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._exchanges:
            exchange = self._exchanges.popleft()
            if not exchange.written:
                self._write_error(record_of(exchange.scope), error, False)
            self._abandon(exchange)
        elif not self._closing:
            seen = self._parser.seen
            record = new_record(seen.method, seen.fields)
            record.route = _SCORING.get(seen.path, UNMATCHED)
            self._write_error(record, error, False)
            self._operations.finish(record, seen.fields)
        transport.close()

    def _write_error(self, record: RequestRecord, error: GpuscoreError, keep_alive: bool) -> None:
        timing = server_timing(record) if self._config.timing_headers else None
        record.refuse(error.status, error.code)
        fields, body = error_parts(error, record, timing)
        record.bytes_out = len(body)
        close = () if keep_alive else (CLOSE,)
        self.write(head_of(error.status, self.default_fields, fields, close) + body)

    def _abandon(self, exchange: Exchange) -> None:
        """Nobody waits for its answer any more."""
        self._gate.leave(exchange)
        exchange.leave()
        if exchange.task is None:  # nor does the application know of it
            record = record_of(exchange.scope)
            record.route = exchange.scope["path"] if exchange.scoring else UNMATCHED
            self._operations.finish(record, exchange.scope["headers"])

    def _scope(self, head: Head) -> Scope:
        """As ASGI has it, with the request's record."""
        scope = scope_of(head, self._addresses)
        scope["state"]["draining"] = self._gate.draining
        record_of(scope)
        return scope

    def _late(self) -> None:
        """The deadline is over."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        head, body = self._config.header_timeout, self._config.body_timeout
        if self._reading is not None:
            self._fail(RequestTimeout(f"the body was not complete after {body:g} seconds"))
        elif self._parser.in_head and not self._closing and (self._parser.begun or not self._used):
            self._fail(RequestTimeout(f"the request head was not complete after {head:g} seconds"))
        else:  # idle, or it sends what nobody wants
            transport.close()
