"""The load generator of `gpuscore bench`, over asyncio with keep-alive connections.

Closed loop: every client sends its next request when its last one is answered. Open loop: requests
are due at given times, whatever the server does. Latency counts from the due time, so a stall adds
to the latency of every request that it delays (no coordinated omission; Tene 2013). Bodies are
encoded before the run, and answers are checked after it.
"""

import asyncio
import gc
import signal
import ssl
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import h11  # a dependency of httpx
import httpx
import numpy as np

from gpuscore.types.batch import Float64Array, Int64Array

STALE = 2.0  # idle seconds after which a connection is not used again; servers close it after 5
LOST = 0  # status of a request without an answer
MOST_CONNECTIONS = 4000


def authorized(key: str | None) -> dict[str, str]:
    """Return the headers that carry a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


class Record:
    """Times, status and answer of each request; times are seconds of the loop's clock."""

    def __init__(self, count: int) -> None:
        self.due: Float64Array = np.full(count, np.nan)  # scheduled arrival; NaN: never sent
        self.sent: Float64Array = np.full(count, np.nan)
        self.done: Float64Array = np.full(count, np.nan)
        self.status: Int64Array = np.full(count, LOST, dtype=np.int64)
        self.bodies: list[bytes] = [b""] * count
        self.client_seconds = 0.0  # CPU time of this process
        self.lost_because = ""  # why the latest request was lost

    @property
    def latency(self) -> Float64Array:
        return self.done - self.due

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last answer; NaN without an answer."""
        known = self.done[~np.isnan(self.done)]
        return float(known.max() - np.nanmin(self.due)) if known.size else float("nan")


class Connection:
    """A keep-alive connection for one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)
        self.idle_since = 0.0

    @property
    def reusable(self) -> bool:
        return self._http.our_state is h11.IDLE and not self._reader.at_eof()

    async def ask(self, head: h11.Request, body: bytes) -> tuple[int, bytes]:
        """Send a request; return the answer's status and body.

        Raises:
            OSError, h11.RemoteProtocolError: there was no valid answer.
        """
        http = self._http
        status = LOST
        parts = list[bytes]()
        events = (head, h11.Data(data=body), h11.EndOfMessage())
        self._writer.write(b"".join(http.send(event) or b"" for event in events))
        while not isinstance(event := http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                http.receive_data(data := await self._reader.read(2**16))
                if not data and http.their_state is h11.SEND_RESPONSE:
                    raise ConnectionResetError("the connection ended (closed)")
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
        if http.our_state is h11.DONE and http.their_state is h11.DONE:
            http.start_next_cycle()
        return status, b"".join(parts)

    def abort(self) -> None:
        self._writer.transport.abort()


class LoadGenerator:
    """Sends requests and records their answers. After `patience` seconds without any answer, all
    requests in flight are lost."""

    def __init__(
        self, url: httpx.URL, key: str | None, bodies: Sequence[bytes], patience: float
    ) -> None:
        self._url = url
        self._bodies = bodies
        self._patience = patience
        headers = authorized(key) | {"Content-Type": "application/json"}
        self._heads = [
            h11.Request(method="POST", target=url.raw_path, headers=request.headers.raw)
            for request in (httpx.Request("POST", url, headers=headers, content=b) for b in bodies)
        ]
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self.record = Record(len(bodies))
        self._idle: list[Connection] = []  # last in, first out
        self._open: set[Connection] = set()
        self._in_flight = 0

    def closed(self, clients: int = 1) -> Record:
        """Keep `clients` requests in flight; return after the last answer, or after `patience`
        seconds without one."""
        return self._run(self._closed_loop(min(clients, len(self._bodies))))

    def open(self, offsets: Float64Array) -> Record:
        """Send request i `offsets[i]` seconds after the start.

        At most MOST_CONNECTIONS are in flight; others wait here, and their latency includes it.
        """
        return self._run(self._open_loop(offsets.tolist()))

    def _run(self, loop: Coroutine[Any, Any, None]) -> Record:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a destructor would lose it
        gc.collect()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        gc.disable()
        cpu = time.process_time()
        try:
            asyncio.run(self._bounded(loop))
        finally:
            gc.enable()
        self.record.client_seconds = time.process_time() - cpu
        return self.record

    async def _bounded(self, loop: Coroutine[Any, Any, None]) -> None:
        self._now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._patience) as self._limit:
                await loop
        except TimeoutError:
            self.record.lost_because = f"no answer within {self._patience:g} s"
        except OSError as error:
            self.record.lost_because = str(error)
        for connection in self._open:
            connection.abort()
        await asyncio.sleep(0)

    async def _closed_loop(self, clients: int) -> None:
        for start in range(0, clients, 64):  # connections are made before the time starts
            count = min(64, clients - start)
            self._idle += await asyncio.gather(*(self._connect() for _ in range(count)))
        numbers = iter(range(len(self._bodies)))

        async def client() -> None:
            for number in numbers:
                await self._ask(number, self._now())

        await asyncio.gather(*(client() for _ in range(clients)))

    async def _open_loop(self, offsets: Sequence[float]) -> None:
        slots = asyncio.Semaphore(MOST_CONNECTIONS)

        async def send_one(number: int, due: float) -> None:
            self.record.due[number] = due
            async with slots:
                await self._ask(number, due)

        start = self._now() + 0.1
        async with asyncio.TaskGroup() as tasks:
            for number, offset in enumerate(offsets):
                await asyncio.sleep(start + offset - self._now())
                tasks.create_task(send_one(number, start + offset))

    async def _ask(self, number: int, due: float) -> None:
        record = self.record
        body = self._bodies[number]
        record.due[number] = due
        if not self._in_flight:
            self._extend_limit()  # nothing was in flight, so nothing was late
        self._in_flight += 1
        connection: Connection | None = None
        try:
            connection = self._unused() or await self._connect()
            record.sent[number] = self._now()
            answer = await connection.ask(self._heads[number], body)
            record.status[number], record.bodies[number] = answer
            record.done[number] = connection.idle_since = self._now()
            self._extend_limit()
        except OSError as error:
            record.lost_because = str(error) or type(error).__name__
        except h11.RemoteProtocolError as error:
            record.lost_because = f"no valid HTTP: {error}"
        finally:
            self._in_flight -= 1
            if connection is not None and connection.reusable:
                self._idle.append(connection)
            elif connection is not None:
                self._close(connection)

    def _extend_limit(self) -> None:
        if not self._limit.expired():
            self._limit.reschedule(self._now() + self._patience)

    def _unused(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.idle_since > self._now() - STALE:
                return connection
            self._close(connection)
        return None

    async def _connect(self) -> Connection:
        port = self._url.port or (80 if self._tls is None else 443)
        streams = await asyncio.open_connection(self._url.host, port, ssl=self._tls)
        connection = Connection(*streams)
        connection.idle_since = self._now()
        self._open.add(connection)
        return connection

    def _close(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.abort()
