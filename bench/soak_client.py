"""The soak's client: requests at Poisson times over keep-alive connections, and misbehaving
callers. One process, loopback only; every wait is bounded."""

import asyncio
import json
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
from soak_requests import Known, same

STALE = 2.0  # idle seconds after which a connection is not used again; the server closes it after 5
PATIENCE = 150.0  # seconds, more than --request-timeout, after which an answer counts as lost
LIVE = ("livez",)  # kinds of requests that must never be refused
REFUSED = (429, 503)
HOSTILE_SHARE = 0.12  # of all arrivals
SHOWN_ERRORS = 20

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Tally:
    """Counts of the answers, and what was wrong with them."""

    statuses: Counter[str] = field(default_factory=Counter)  # "kind status"
    wrong: int = 0
    lost: int = 0
    unexpected: int = 0
    checked: int = 0  # answers that were compared with the known one
    attacks: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)  # since the last sample
    errors: list[str] = field(default_factory=list)  # the first ones, for the report

    def note(self, text: str) -> None:
        if len(self.errors) < SHOWN_ERRORS:
            self.errors.append(text)


class Client:
    def __init__(self, address: tuple[str, int], key: str) -> None:
        self.address, self.key = address, key
        self.tally = Tally()
        self._idle: deque[tuple[float, Pair]] = deque()

    def wire(self, known: Known, *fields: str, length: int | None = None) -> bytes:
        """Return a request as bytes; `length` is sent as Content-Length instead of the body's."""
        method = "POST" if known.body else "GET"
        lines = [
            f"{method} {known.path} HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {self.key}",
        ]
        if known.body:
            size = len(known.body) if length is None else length
            lines += ["Content-Type: application/json", f"Content-Length: {size}"]
        return "\r\n".join([*lines, *fields, "", ""]).encode() + known.body

    async def first_answer(self, known: Known) -> Known:
        """Send a request alone; return it with its answer."""
        status, body = await self.exchange(self.wire(known))
        if status != 200:
            raise RuntimeError(f"{known.kind} was answered {status}: {body[:300]!r}")
        return replace(known, answer=json.loads(body))

    async def ask(self, known: Known, *fields: str, also: Sequence[int] = ()) -> None:
        """Send a request and check its answer; `also` lists further statuses that are right."""
        tally, began = self.tally, time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                status, body = await self.exchange(self.wire(known, *fields))
        except (OSError, EOFError, TimeoutError) as error:
            tally.lost += 1
            tally.note(f"{known.kind}: lost, {type(error).__name__} {error}")
            return
        tally.latencies.append(time.monotonic() - began)
        tally.statuses[f"{known.kind} {status}"] += 1
        if status == 200:
            self._check(known, body)
        elif status not in (() if known.kind in LIVE else REFUSED) and status not in also:
            tally.unexpected += 1
            tally.note(f"{known.kind}: {status} {body[:200]!r}")

    async def expect(self, known: Known, status: int, *fields: str) -> None:
        """Send a request that must be refused with this status."""
        got, body = await self.exchange(self.wire(known, *fields))
        self.tally.statuses[f"refused {got}"] += 1
        if got not in (status, *REFUSED):
            self.tally.unexpected += 1
            self.tally.note(f"{known.kind} instead of {status}: {got} {body[:200]!r}")

    def _check(self, known: Known, body: bytes) -> None:
        self.tally.checked += 1
        if not same(known.answer, json.loads(body)):
            self.tally.wrong += 1
            self.tally.note(f"{known.kind}: wrong, {body[:300]!r} for {known.body[:300]!r}")

    async def exchange(self, data: bytes) -> tuple[int, bytes]:
        reader, writer = pair = await self._connection()
        kept = False
        try:
            writer.write(data)
            status, headers, body = await read_answer(reader)
            kept = headers.get("connection") != "close"
            return status, body
        finally:
            if kept:
                self._idle.append((time.monotonic(), pair))
            else:
                writer.close()

    async def _connection(self) -> Pair:
        while self._idle:
            since, pair = self._idle.pop()
            if time.monotonic() - since < STALE:
                return pair
            pair[1].close()
        return await asyncio.open_connection(*self.address)

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1][1].close()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Read status, headers and body; raises EOFError if the connection ends before that."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.split(": ", 1) for line in head[1:] if line)
    headers = {name.lower(): value for name, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return int(head[0].split(" ")[1]), headers, body


class Hostile:
    """Callers that misbehave; most of their answers are checked too."""

    def __init__(
        self, client: Client, large: Known, small: Known, rng: np.random.Generator
    ) -> None:
        self.client, self.large, self.small, self.rng = client, large, small, rng
        self.attacks: list[Callable[[], Awaitable[None]]] = [
            *(self.half_body, self.reset, self.slow_reader, self.leaves, self.deadline),
            *(self.wrong_body, self.wrong_key, self.long_head, self.nonsense),
        ]

    async def any(self) -> None:
        attack = self.attacks[self.rng.integers(len(self.attacks))]
        self.client.tally.attacks[attack.__name__.replace("_", " ")] += 1
        try:
            async with asyncio.timeout(PATIENCE):
                await attack()
        except (OSError, EOFError):
            pass  # the server may close the connection of such a caller
        except TimeoutError:
            self.client.tally.lost += 1
            self.client.tally.note(f"{attack.__name__}: hung")

    async def half_body(self) -> None:
        data = self.client.wire(self.small)
        await self._raw(data[: -len(self.small.body) // 2], pause=self.rng.uniform(0, 1))

    async def reset(self) -> None:
        await self._raw(self.client.wire(self.large)[:-5], pause=0.01, hard=True)

    async def leaves(self) -> None:
        """Close the connection while the request is computed."""
        await self._raw(self.client.wire(self.large), pause=self.rng.uniform(0, 0.1))

    async def slow_reader(self) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.client.address)
        reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
        writer.write(self.client.wire(self.large))
        with suppress(asyncio.IncompleteReadError):
            for _ in range(10):
                await reader.readexactly(100)
                await asyncio.sleep(0.1)
        writer.close()

    async def deadline(self) -> None:
        milliseconds = int(self.rng.integers(1, 30))
        await self.client.ask(self.large, f"X-Request-Timeout-Ms: {milliseconds}", also=(504,))

    async def wrong_body(self) -> None:
        await self.client.expect(replace(self.small, body=self.small.body[:-9]), 400)

    async def wrong_key(self) -> None:
        stranger = Client(self.client.address, "key-of-nobody")
        stranger.tally = self.client.tally
        await stranger.expect(self.small, 401)
        stranger.close()

    async def long_head(self) -> None:
        await self.client.expect(self.small, 431, f"X-Long: {'x' * 20_000}")

    async def nonsense(self) -> None:
        await self._raw(self.rng.bytes(self.rng.integers(1, 2000)), pause=0.05)

    async def _raw(self, data: bytes, pause: float, hard: bool = False) -> None:
        """Send, wait a moment and close without reading; `hard` closes with a reset."""
        _, writer = await asyncio.open_connection(*self.client.address)
        writer.write(data)
        await asyncio.sleep(pause)
        if hard:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


async def drive(
    client: Client, hostile: Hostile, known: Sequence[Known], rate: float, seconds: float, seed: int
) -> None:
    """Send requests at Poisson times until the time is up; return when all are answered."""
    rng = np.random.default_rng(seed)
    weights = np.array([request.weight for request in known])
    weights /= weights.sum()
    running: set[asyncio.Task[None]] = set()
    due, end = time.monotonic(), time.monotonic() + seconds
    while (due := due + rng.exponential(1 / rate)) < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        chosen = known[rng.choice(len(known), p=weights)]
        attack = rng.random() < HOSTILE_SHARE
        task = asyncio.create_task(hostile.any() if attack else client.ask(chosen))
        running.add(task)
        task.add_done_callback(running.discard)
    if running:
        await asyncio.gather(*running)
    client.close()
