"""The load generator: keep-alive connections over asyncio, with bodies that were encoded before.

Closed loop: every connection sends its next request when the last answer is complete. Open loop:
requests are due at given times whatever the server does, and latency counts from the due time, so a
stall adds to the latency of every request that it delays (no coordinated omission; Tene 2013).
Answers are kept and checked after the run.
"""

import asyncio
import gc
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11  # httpx brings it
import numpy as np

from gpuscore.errors import UsageError
from gpuscore.types.batch import Float64Array, Int64Array

STALE = 2.0  # idle seconds after which a connection is not used again; servers close it after 5
LOST = 0  # status of a request without an answer
MOST_CONNECTIONS = 4000


@dataclass(frozen=True, slots=True)
class Address:
    """A place for requests: a host, a path before the API's path, and a key or None."""

    host: str
    port: int
    tls: bool
    path: str
    key: str | None

    @classmethod
    def read(cls, url: str, key: str | None = None) -> "Address":
        """Read a URL; raise UsageError unless it is one of http or https that names a host."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"--url {url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--url {url}: must begin with http:// or https:// and name a host")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"), key)

    def head(self, path: str, size: int) -> h11.Request:
        host = f"[{self.host}]" if ":" in self.host else self.host
        headers = [
            ("Host", f"{host}:{self.port}"),
            ("Content-Type", "application/json"),
            ("Content-Length", str(size)),
        ]
        headers += [("Authorization", f"Bearer {self.key}")] if self.key else []
        return h11.Request(method="POST", target=self.path + path, headers=headers)


class Record:
    """Times, status and answer of each request; times are seconds of the loop's clock."""

    def __init__(self, count: int) -> None:
        self.due: Float64Array = np.full(count, np.nan)  # scheduled arrival; NaN: never sent
        self.sent: Float64Array = np.full(count, np.nan)
        self.done: Float64Array = np.full(count, np.nan)
        self.status: Int64Array = np.full(count, LOST, dtype=np.int64)
        self.bodies: list[bytes] = [b""] * count
        self.client_seconds = 0.0  # CPU time of this process
        self.lost_because = ""  # of the last connection that could not be used

    @property
    def latency(self) -> Float64Array:
        return self.done - self.due

    @property
    def seconds(self) -> float:
        """From the first arrival to the last answer; NaN without an answer."""
        known = self.done[~np.isnan(self.done)]
        return float(known.max() - np.nanmin(self.due)) if known.size else float("nan")


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request in flight."""

    def __init__(self, load: "LoadLoop") -> None:
        self.load = load
        self.request = -1  # request in flight; -1 = none
        self.idle_since = 0.0
        self._http = h11.Connection(h11.CLIENT)
        self._status, self._parts = LOST, list[bytes]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  (a stream's)
        self.transport = transport

    def send(self, request: int) -> None:
        self.request, load, http = request, self.load, self._http
        body = load.bodies[request]
        wire = http.send(load.address.head(load.path, len(body))) or b""
        wire += (http.send(h11.Data(data=body)) or b"") + (http.send(h11.EndOfMessage()) or b"")
        load.record.sent[request] = load.loop.time()
        self.transport.write(wire)

    def data_received(self, data: bytes) -> None:
        if self.request < 0:  # such as 408 for an idle connection
            self.transport.abort()
            return
        self._receive(data)

    def eof_received(self) -> None:
        if self.request >= 0:
            self._receive(b"")  # the end of an answer without a length

    def _receive(self, data: bytes) -> None:
        try:
            self._http.receive_data(data)
            while (event := self._http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Response):
                    self._status = event.status_code
                elif isinstance(event, h11.Data):
                    self._parts.append(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    return self._finish()
                elif isinstance(event, h11.ConnectionClosed):
                    return
        except h11.RemoteProtocolError as error:
            said = f"no valid HTTP: {error}" if data else "the connection ended (closed)"
            self.load.record.lost_because = said
            self.transport.abort()

    def _finish(self) -> None:
        request, self.request = self.request, -1
        status, body = self._status, b"".join(self._parts)
        self._parts = []
        reusable = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        if reusable:
            self._http.start_next_cycle()
        else:
            self.transport.close()
        self.load.answered(self if reusable else None, request, status, body)

    def connection_lost(self, exc: Exception | None) -> None:
        request, self.request = self.request, -1
        if request >= 0 and not self.load.record.lost_because:
            self.load.record.lost_because = f"the connection ended ({exc or 'closed'})"
        self.load.gone(self, request)


class LoadLoop(ABC):
    """The parts that both loops share.

    Args:
        address: of the server.
        path: of the API.
        bodies: of the requests.
        patience: seconds without any answer after which all requests in flight count as lost.
    """

    def __init__(
        self, address: Address, path: str, bodies: Sequence[bytes], patience: float
    ) -> None:
        self.address, self.path, self.bodies, self.patience = address, path, bodies, patience
        self.record = Record(len(bodies))
        self.in_flight = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._tls = ssl.create_default_context() if address.tls else None

    def run(self) -> Record:
        """Send all requests; return when the last answer has arrived, or patience has ended."""
        gc.collect()
        gc.disable()
        cpu = time.process_time()
        try:
            asyncio.run(self._bounded())
        finally:
            gc.enable()
        self.record.client_seconds = time.process_time() - cpu
        return self.record

    async def _bounded(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.over = self.loop.create_future()
        self.open: set[Connection] = set()
        self._progress = self.loop.time()
        drive = self.loop.create_task(self.drive())
        while not drive.done() and self.loop.time() - self._progress < self.patience:
            await asyncio.wait([drive], timeout=0.25)
        if not drive.done():
            self.record.lost_because = f"no answer within {self.patience:g} s"
            drive.cancel()
        elif (error := drive.exception()) is not None:
            self.record.lost_because = str(error)
        self.over.cancel()
        for connection in list(self.open):
            connection.transport.abort()
        await asyncio.sleep(0)

    @abstractmethod
    async def drive(self) -> None:
        """Send all requests; return when the last answer has arrived."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def connect(self) -> Connection:
        _, connection = await self.loop.create_connection(
            lambda: Connection(self), self.address.host, self.address.port, ssl=self._tls
        )
        self.open.add(connection)
        return connection

    def start(self, connection: Connection, request: int, due: float) -> None:
        self.record.due[request] = due
        self.in_flight += 1
        connection.send(request)

    def answered(
        self, connection: Connection | None, request: int, status: int, body: bytes
    ) -> None:
        self._progress = self.loop.time()
        self.record.done[request] = self._progress
        self.record.status[request] = status
        self.record.bodies[request] = body
        self.in_flight -= 1
        self.next(connection)

    def gone(self, connection: Connection, request: int) -> None:
        self.open.discard(connection)
        if request >= 0 and not self.over.done():
            self.in_flight -= 1
            self.next(None)

    @abstractmethod
    def next(self, connection: Connection | None) -> None:
        """Continue after a request has ended; `connection` can be used again, or is None."""


class ClosedLoop(LoadLoop):
    """Keeps `clients` requests in flight."""

    def __init__(
        self,
        address: Address,
        path: str,
        bodies: Sequence[bytes],
        patience: float,
        clients: int = 1,
    ) -> None:
        super().__init__(address, path, bodies, patience)
        self.clients = min(clients, len(bodies))
        self._next = 0

    async def drive(self) -> None:
        for start in range(0, self.clients, 64):
            count = min(64, self.clients - start)
            await asyncio.gather(*(self.connect() for _ in range(count)))
        for connection in list(self.open):
            self.next(connection)
        await self.over

    def next(self, connection: Connection | None) -> None:
        if self._next < len(self.bodies):
            if connection is None:  # it ended: open another
                self.spawn(self._replace())
                return
            self._next += 1
            self.start(connection, self._next - 1, self.loop.time())
        elif self.in_flight == 0 and not self.over.done():
            self.over.set_result(None)

    async def _replace(self) -> None:
        try:
            self.next(await self.connect())
        except OSError as error:
            self.record.lost_because = str(error)
            if self.in_flight == 0 and not self.over.done():
                self.over.set_result(None)


class OpenLoop(LoadLoop):
    """Sends request i `offsets[i]` seconds after the start.

    At most MOST_CONNECTIONS are in flight; others wait here, which adds to their latency.
    """

    def __init__(
        self,
        address: Address,
        path: str,
        bodies: Sequence[bytes],
        patience: float,
        offsets: Float64Array,
    ) -> None:
        super().__init__(address, path, bodies, patience)
        self.offsets = offsets
        self._idle: list[Connection] = []  # the last one used is taken first
        self._waiting: deque[tuple[int, float]] = deque()
        self._left = len(bodies)

    async def drive(self) -> None:
        start = self.loop.time() + 0.1
        for request, offset in enumerate(self.offsets.tolist()):
            delay = start + offset - self.loop.time()
            if delay > 0:
                await asyncio.sleep(delay)
            if not self.in_flight:
                self._progress = self.loop.time()  # nothing was waited for
            self._dispatch(request, start + offset)
        await self.over

    def _dispatch(self, request: int, due: float) -> None:
        self.record.due[request] = due
        while self._idle:
            connection = self._idle.pop()
            fresh = connection.idle_since > self.loop.time() - STALE
            if fresh and not connection.transport.is_closing():
                return self.start(connection, request, due)
            connection.transport.abort()
        self._waiting.append((request, due))
        self._open_more()

    def gone(self, connection: Connection, request: int) -> None:
        super().gone(connection, request)
        if self._waiting:
            self._open_more()

    def _open_more(self) -> None:
        if len(self.open) + len(self._tasks) < MOST_CONNECTIONS:
            self.spawn(self._open_one())

    async def _open_one(self) -> None:
        try:
            self._use(await self.connect())
        except OSError as error:
            self.record.lost_because = str(error)
            with suppress(IndexError):  # the connection was refused: a request is lost
                self._waiting.popleft()
                self._count_down()

    def next(self, connection: Connection | None) -> None:
        if connection is not None:
            self._use(connection)
        self._count_down()

    def _use(self, connection: Connection) -> None:
        if self._waiting:
            self.start(connection, *self._waiting.popleft())
        else:
            connection.idle_since = self.loop.time()
            self._idle.append(connection)

    def _count_down(self) -> None:
        self._left -= 1
        if self._left == 0 and not self.over.done():
            self.over.set_result(None)
