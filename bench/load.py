"""The load generator: keep-alive connections over asyncio, with requests encoded beforehand.

Closed loop: every connection sends its next request when the last answer is complete. Open loop:
requests are due at given times whatever the server does, and latency counts from the due time, so a
stall adds to the latency of every request that it delays (no coordinated omission). Answers are
kept and checked after the run. Loopback only; count and time are bounded.
"""

import asyncio
import gc
import ipaddress
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

GRACE = 30.0  # seconds for requests in flight when the time is up; then they count as lost
STALE = 2.0  # idle seconds after which a connection is not used again; servers close it after 5
LOST = 0  # status of a request without an answer


class Record:
    """Times, status and answer of each request; times are seconds of the loop's clock."""

    def __init__(self, count: int, is_open: bool) -> None:
        self.open = is_open
        self.due = np.full(count, np.nan)  # scheduled arrival
        self.sent = np.full(count, np.nan)
        self.done = np.full(count, np.nan)
        self.status = np.full(count, LOST)
        self.bodies: list[bytes] = [b""] * count
        self.order: list[int] = []  # requests in the order of their answers
        self.began = self.ended = 0.0  # start and end of the measured part
        self.client_cpu = 0.0  # seconds of this process
        self.broken = 0  # lost because the connection broke, not because time was up

    @property
    def latency(self) -> np.ndarray:
        return self.done - self.due

    @property
    def tried(self) -> np.ndarray:
        return ~np.isnan(self.due)


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request in flight."""

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.request = -1  # request in flight; -1 = none
        self.idle_since = 0.0
        self._buffer = b""
        self._size = 0  # bytes of the answer with its head; 0 = the head is not complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send(self, request: int) -> None:
        self.request, run = request, self.run
        run.record.sent[request] = run.loop.time()
        self.transport.write(run.wires[request])

    def data_received(self, data: bytes) -> None:
        if self.request < 0:  # such as 408 for an idle connection
            self.transport.abort()
            return
        self._buffer = data if not self._buffer else self._buffer + data
        if (self._size or self._read_head()) and len(self._buffer) >= self._size:
            self._finish()

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        self._head = self._buffer[:end].lower()
        _, found, rest = self._head.partition(b"content-length:")
        if not found:
            self.transport.abort()  # the server always sends Content-Length
            return False
        self._body_at = end + 4
        self._size = end + 4 + int(rest.split(b"\r\n", 1)[0])
        return True

    def _finish(self) -> None:
        request, self.request = self.request, -1
        status, body = int(self._buffer[9:12]), self._buffer[self._body_at : self._size]
        reusable = len(self._buffer) == self._size and b"connection: close" not in self._head
        self._buffer, self._size = b"", 0
        if not reusable:
            self.transport.close()
        self.run.answered(self if reusable else None, request, status, body)

    def connection_lost(self, exc: Exception | None) -> None:
        request, self.request = self.request, -1
        self.run.gone(self, request)


class Run(ABC):
    """The parts that both loops share."""

    def __init__(self, address: tuple[str, int], wires: Sequence[bytes], seconds: float) -> None:
        if not ipaddress.ip_address(address[0]).is_loopback:
            raise ValueError(f"{address[0]} is not this machine: load goes to loopback only")
        self.address, self.wires, self.seconds = address, wires, seconds
        self.record = Record(len(wires), isinstance(self, OpenLoop))
        self.in_flight = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def execute(self) -> Record:
        gc.collect()
        gc.disable()
        cpu = time.process_time()
        try:
            asyncio.run(self._bounded())
        finally:
            gc.enable()
        self.record.client_cpu = time.process_time() - cpu
        return self.record

    async def _bounded(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.over = self.loop.create_future()
        self.open: set[Connection] = set()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.seconds + GRACE):
                await self.drive()
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
        _, connection = await self.loop.create_connection(lambda: Connection(self), *self.address)
        self.open.add(connection)
        return connection

    def start(self, connection: Connection, request: int, due: float) -> None:
        self.record.due[request] = due
        self.in_flight += 1
        connection.send(request)

    def answered(
        self, connection: Connection | None, request: int, status: int, body: bytes
    ) -> None:
        record = self.record
        record.done[request] = self.loop.time()
        record.status[request] = status
        record.bodies[request] = body
        record.order.append(request)
        self.in_flight -= 1
        self.next(connection)

    def gone(self, connection: Connection, request: int) -> None:
        self.open.discard(connection)
        if request >= 0:
            self.record.broken += not self.over.done()
            self.in_flight -= 1
            self.next(None)

    @abstractmethod
    def next(self, connection: Connection | None) -> None:
        """Continue after a request has ended; `connection` can be used again, or is None."""


class ClosedLoop(Run):
    """Keeps `clients` requests in flight; stops sending after `seconds`.

    The first and the last `clients` answers are not measured.
    """

    def __init__(
        self, address: tuple[str, int], wires: Sequence[bytes], seconds: float, clients: int
    ) -> None:
        super().__init__(address, wires, seconds)
        self.clients = clients
        self._next = 0

    async def drive(self) -> None:
        for start in range(0, self.clients, 64):
            count = min(64, self.clients - start)
            await asyncio.gather(*(self.connect() for _ in range(count)))
        self._deadline = self.loop.time() + self.seconds
        for connection in list(self.open):
            self.next(connection)
        await self.over
        self._set_window()

    def next(self, connection: Connection | None) -> None:
        now = self.loop.time()
        more = self._next < len(self.wires) and now < self._deadline
        if more and connection is not None:
            self._next += 1
            self.start(connection, self._next - 1, now)
        elif more:  # the connection broke: open another
            self.spawn(self._replace())
        elif self.in_flight == 0 and not self.over.done():
            self.over.set_result(None)

    async def _replace(self) -> None:
        try:
            self.next(await self.connect())
        except OSError:
            if self.in_flight == 0 and not self.over.done():
                self.over.set_result(None)

    def _set_window(self) -> None:
        order = self.record.order
        if len(order) > 2 * self.clients:
            self.record.began = self.record.done[order[self.clients - 1]]
            self.record.ended = self.record.done[order[-self.clients - 1]]


class OpenLoop(Run):
    """Sends request i `offsets[i]` seconds after the start, and leaves out `warmup` seconds.

    `max_connections` bounds requests in flight; others wait here, which adds to their latency."""

    def __init__(
        self,
        address: tuple[str, int],
        wires: Sequence[bytes],
        offsets: np.ndarray,
        warmup: float,
        max_connections: int = 4000,
    ) -> None:
        super().__init__(address, wires, float(offsets[-1]) + 1.0)
        self.offsets, self.warmup, self.max_connections = offsets, warmup, max_connections
        self._idle: list[Connection] = []  # the last one used is taken first
        self._waiting: deque[tuple[int, float]] = deque()
        self._left = len(wires)

    async def drive(self) -> None:
        start = self.loop.time() + 0.1
        self.record.began = start + self.warmup
        self.record.ended = start + float(self.offsets[-1])
        for request, offset in enumerate(self.offsets.tolist()):
            delay = start + offset - self.loop.time()
            if delay > 0:
                await asyncio.sleep(delay)
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
        if len(self.open) + len(self._tasks) < self.max_connections:
            self.spawn(self._open_one())

    async def _open_one(self) -> None:
        try:
            self._use(await self.connect())
        except OSError:
            if self._waiting:  # the connection was refused: a request is lost
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
