"""A thousand callers, each with one request in flight, that check every answer."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

PATIENCE = 60.0  # seconds until a missing answer counts as lost
REFUSED = {429: "overloaded", 503: "unavailable", 504: "deadline_exceeded"}
BACKOFF = 0.2  # seconds before a refused caller asks again


@dataclass
class Outcome:
    """The results of the requests; each entry of `wrong` is a broken promise."""

    statuses: Counter[int] = field(default_factory=Counter)
    broken: int = 0  # connections that ended before the answer
    unsent: int = 0  # of those, connections that failed before the request was sent
    wrong: list[str] = field(default_factory=list)

    @property
    def answers(self) -> int:
        return sum(self.statuses.values())


class Crowd:
    """Callers that go on until told to stop.

    Args:
        address: the server's address.
        known: bodies and their right scores.
        size: number of callers, and so of requests in flight.
    """

    def __init__(
        self, address: tuple[str, int], known: Sequence[tuple[bytes, object]], size: int = 1024
    ) -> None:
        self.address, self.known, self.size = address, known, size
        self.outcome = Outcome()
        self._ended = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Crowd":
        self._tasks = [asyncio.create_task(self._caller(n)) for n in range(self.size)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let each caller receive the answer that it waits for."""
        self.end()
        await asyncio.gather(*self._tasks)

    def end(self) -> None:
        """Let no caller send another request."""
        self._ended = True

    async def until(self, answers: int, seconds: float = 60.0) -> None:
        """Wait for `answers` further answers of 200."""
        wanted = self.outcome.statuses[200] + answers
        async with asyncio.timeout(seconds):
            while self.outcome.statuses[200] < wanted:
                await asyncio.sleep(0.02)

    async def _caller(self, number: int) -> None:
        streams, count = None, 0
        while not self._ended:
            count += 1
            try:
                streams = streams or await self._open()
                kept = await self._ask(*streams, f"c{number}-{count}")
            except (OSError, EOFError):
                self.outcome.broken += 1
                kept = False
            except TimeoutError:
                self.outcome.wrong.append(f"no answer to c{number}-{count} in {PATIENCE} s")
                kept = False
            if not kept:
                if streams is not None:
                    streams[1].close()
                streams = None
                await asyncio.sleep(BACKOFF)
        if streams is not None:
            with suppress(TimeoutError):  # a second answer to the last request would be read here
                extra = await asyncio.wait_for(streams[0].read(1), 0.05)
                if extra:
                    self.outcome.wrong.append(f"more than one answer on c{number}")
            streams[1].close()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_connection(*self.address)
        except OSError:
            self.outcome.unsent += 1
            raise

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str
    ) -> bool:
        """Send a request and check its answer; return True if the connection can be used again."""
        body, scores = self.known[hash(name) % len(self.known)]
        head = (
            f"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {name}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        async with asyncio.timeout(PATIENCE):
            status, headers, content = await read_answer(reader)
        self.outcome.statuses[status] += 1
        if problem := _problem(status, headers, json.loads(content), name, scores):
            self.outcome.wrong.append(f"{name}: {problem}")
        if status != 200:
            await asyncio.sleep(BACKOFF)
        return headers.get("connection") != "close"


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Return status, fields and body; raise EOFError if the connection ends before that."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = (line.split(": ", 1) for line in head[1:] if line)
    headers = {name.lower(): value for name, value in fields}
    return (
        int(head[0].split()[1]),
        headers,
        await reader.readexactly(int(headers["content-length"])),
    )


def _problem(
    status: int, headers: dict[str, str], body: dict[str, object], name: str, scores: object
) -> str:
    """Return how an answer breaks the contract; empty if it does not."""
    if headers.get("x-request-id") != name:
        return f"the answer of {headers.get('x-request-id')}"
    if status == 200:
        return "" if body["scores"] == scores else f"{body['scores']} instead of {scores}"
    error = body.get("error")
    if not isinstance(error, dict) or error.get("code") != REFUSED.get(status):
        return f"{status} {body}"
    after = headers.get("retry-after", "")
    if status != 504 and not (after.isdigit() and 1 <= int(after) <= math.inf):
        return f"{status} with Retry-After {after!r}"
    return ""
