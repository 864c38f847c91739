"""The gate: the ASGI middleware in front of all routes, of `gpuscore serve` and of Ray's ingress.

An overloaded server must refuse requests at a small part of the cost of answering them. So a head
is checked before there is a task, a body or any JSON, and a connection writes the refusal at once.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from time import monotonic

from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from gpuscore.config import ServerConfig
from gpuscore.dialects.paths import no_such_path
from gpuscore.dialects.table import DIALECT_OF, error_answer
from gpuscore.errors import (
    BodyTooLarge,
    GpuscoreError,
    InternalError,
    InvalidApiKey,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestTimeout,
)
from gpuscore.server.http.admission import Admission, AdmittedRequest
from gpuscore.server.http.aliases import read_aliases
from gpuscore.server.http.headers import NO_KEY, ApiKeys, check_host
from gpuscore.server.http.rounds import in_time
from gpuscore.server.observe.operations import Operations
from gpuscore.server.service import Pacer
from gpuscore.types.record import UNMATCHED, RequestRecord, record_of

logger = logging.getLogger(__name__)

# A round of the event loop starts the work of at most this many requests, or of requests with about
# this many bytes; the others wait. (After a long round, `Rounds.pieces` allows more.) This keeps
# rounds to some milliseconds, so that refusals and probes are answered even when a thousand
# requests arrive at once.
STARTS = 8
START_BYTES = 2**18
SLICES = 8  # connections that parse in a round
BYTES_PER_ID = 4  # of a prompt, as the engine gets it
BROKEN = "broken"  # in the scope's state: the error that has ended a body
COUNT = "count"  # in it, too: a function that counts unpacked bytes and those of the answer
_CLOSING = (408, 413, 431)  # after these errors the rest of the request is not read
CLOSE = (b"connection", b"close")

Fields = list[tuple[bytes, bytes]]
Answer = tuple[int, Fields, bytes]  # status, header fields, body


class Gate:
    """The middleware that checks, admits, answers errors, marks answers and keeps the record.

    It finds the route itself, so that keys, limits and the work cannot disagree about the path. It
    treats HEAD as GET; the connection sends no body.

    Args:
        app: has the routes, and gets whatever is not HTTP.
        config: the limits and aliases.
        keys: the valid API keys.
        operations: gets the records; the backlogs of its service decide what is admitted.
        hosts: the names that the server answers to (`read_hosts`).
        open_paths: paths that need no key.
        pieces: returns how many pieces of work a round may do: at least so many (`Rounds.pieces`).
    """

    def __init__(
        self,
        app: FastAPI,
        config: ServerConfig,
        keys: ApiKeys,
        operations: Operations,
        hosts: frozenset[str] | None,
        open_paths: Collection[str],
        pieces: Callable[[int], int] = int,
    ) -> None:
        self.routes = {route.path: route for route in app.routes if isinstance(route, Route)}
        get = ("GET", "HEAD")
        self._methods = {path: ("POST",) if path in DIALECT_OF else get for path in self.routes}
        self._app = app
        self.config = config
        self._keys = keys
        self._hosts = hosts
        self.operations = operations
        self._open = frozenset(open_paths)
        self._service = operations.service
        self._aliases = read_aliases(config)
        self.admission = Admission(self._service, config)
        self.starts = Pacer(partial(pieces, STARTS))
        self.turns = Pacer(partial(pieces, SLICES))  # of connections that parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = record_of(scope)
        send = self._marked(scope, record, send)
        self.operations.running += 1
        try:
            if record.tenant is None:  # the head was not checked
                self._check(scope)
            await self._answer(scope, record, receive, send)
        except ClientDisconnect:
            logger.debug("a client left before its answer")
        except GpuscoreError as error:
            await self._send_error(scope, record, error, send)
        except Exception:
            logger.exception("unhandled error in request %s", record.request_id)
            await self._send_error(scope, record, InternalError("internal error"), send)
        finally:
            self.operations.running -= 1
            self.operations.finish(record, scope["headers"])

    def refusal(self, scope: Scope) -> Answer | None:
        """Check a head, so that `__call__` need not. Return the answer if it is refused; then the
        request is over.
        """
        try:
            self._check(scope)
        except GpuscoreError as error:
            return self.refused(scope, error)
        return None

    def refused(self, scope: Scope, error: GpuscoreError) -> Answer:
        """Return the answer to a request that no route sees, and end its record."""
        record = record_of(scope)
        fields, body = self._error(scope, record, error)
        record.bytes_out = len(body)
        self.operations.finish(record, scope["headers"])
        return error.status, fields + self._marks(scope, record, error.status), body

    def _check(self, scope: Scope) -> None:
        """Raise the error of a head that is refused; otherwise note its tenant and its route."""
        record = record_of(scope)
        headers = scope["headers"]
        path = scope["path"] = self._aliases.get(scope["path"], scope["path"])
        route = self.routes.get(path)
        record.route = UNMATCHED if route is None else path
        check_host(headers, self._hosts)
        if record.bad_request_id:
            raise InvalidRequest(
                "X-Request-Id must be given once, as 1 to 128 of A-Z a-z 0-9 . _ -",
                param="X-Request-Id",
            )
        tenant = self._keys.tenant(headers)
        if tenant is None and path not in self._open:
            raise InvalidApiKey("a valid API key is required: Authorization: Bearer KEY")
        record.tenant = tenant or NO_KEY
        if route is None:
            raise NotFound(no_such_path(path))
        if scope["method"] not in self._methods[path]:
            raise MethodNotAllowed("this path does not support that method")
        if path not in DIALECT_OF:
            return
        if self._service.draining:
            raise self._service.shutting_down()
        length = int(dict(headers).get(b"content-length", 0))
        if length <= self.config.max_body_bytes:  # otherwise `_reader` refuses it
            self.admission.check(record.tenant, length)

    def _check_size(self, size: int) -> None:
        if size > self.config.max_body_bytes:
            raise BodyTooLarge(f"the body is over {self.config.max_body_bytes} bytes")

    async def _answer(
        self, scope: Scope, record: RequestRecord, receive: Receive, send: Send
    ) -> None:
        route = self.routes[scope["path"]]
        if scope["path"] not in DIALECT_OF:
            await route.app(scope, receive, send)
            return
        request = AdmittedRequest(record.tenant or NO_KEY)
        scope["state"][COUNT] = partial(self.admission.add, request)
        try:
            await route.app(scope, self._reader(request, scope, record, receive), send)
        finally:
            self.admission.leave(request)
            self._service.trim_after(max(request.size, BYTES_PER_ID * (record.prompt_tokens or 0)))

    def _reader(
        self, request: AdmittedRequest, scope: Scope, record: RequestRecord, receive: Receive
    ) -> Callable[[], Awaitable[Message]]:
        """Return a `receive` that counts the body, enforces its deadline and its limit, and makes
        the work wait for its turn."""
        seconds = self.config.client_timeout
        announced = int(dict(scope["headers"]).get(b"content-length", 0))
        end = monotonic() + seconds
        complete = False

        async def read() -> Message:
            nonlocal complete
            if complete:  # the only message that may follow says that the client has left
                return await receive()
            self._check_size(announced)
            late = partial(RequestTimeout, f"the body was not complete after {seconds:g} seconds")
            message: Message = await in_time(receive(), end, late)
            if BROKEN in scope["state"]:
                raise scope["state"].pop(BROKEN)
            size = len(message.get("body", b""))
            record.bytes_in += size
            self._check_size(record.bytes_in)
            self.admission.add(request, size)
            if message["type"] == "http.request" and not message.get("more_body", False):
                complete = True
                self.admission.enter(request)
                turn = asyncio.Event()
                self.starts.call(turn.set, 1 + request.size * STARTS // START_BYTES)
                await turn.wait()
            return message

        return read

    def _marked(self, scope: Scope, record: RequestRecord, send: Send) -> Send:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                marks = self._marks(scope, record, message["status"])
                message["headers"] = [*message["headers"], *marks]
            else:
                record.bytes_out += len(message.get("body", b""))
            await send(message)

        return marked

    def _marks(self, scope: Scope, record: RequestRecord, status: int) -> Fields:
        """Return the fields that every answer has."""
        marks = [(b"x-request-id", record.request_id.encode())]
        if self._service.draining or status in _CLOSING:  # the next request goes to another server
            marks.append(CLOSE)
        return marks

    async def _send_error(
        self, scope: Scope, record: RequestRecord, error: GpuscoreError, send: Send
    ) -> None:
        if record.status:  # the answer has begun; its end will be missing
            return
        fields, body = self._error(scope, record, error)
        await send({"type": "http.response.start", "status": error.status, "headers": fields})
        await send({"type": "http.response.body", "body": body})

    def _error(
        self, scope: Scope, record: RequestRecord, error: GpuscoreError
    ) -> tuple[Fields, bytes]:
        fields, body = error_answer(error, record)
        if error.status == MethodNotAllowed.status:
            fields.append((b"allow", ", ".join(self._methods[scope["path"]]).encode()))
        return fields, body
