"""Receiving an answer within a time and a size.

The times of httpx are of single reads and writes, so a server that sends a byte now and then would
hold a call for hours. asyncio can end any wait. A blocking call ends in time because its connection
gives each read and write only what is left.
"""

import asyncio
from contextlib import aclosing, closing
from contextvars import ContextVar
from functools import partial
from math import inf
from time import monotonic
from typing import Any

import httpx

from gpuscore.client.errors import REQUEST_ID, BadAnswer
from gpuscore.client.retries import Reply

CODINGS = ("identity", "gzip", "deflate")  # httpx unpacks these piece by piece
WRITTEN = 2**14  # bytes that a socket takes at once, so that no write waits twice
_until = ContextVar("_until", default=inf)  # on the clock `monotonic`, of this thread's attempt


class _Received:
    """An answer's body as it arrives; raises BadAnswer once it is over `most` bytes."""

    def __init__(self, answer: httpx.Response, request_id: str, most: int) -> None:
        self._answer, self._id, self._most = answer, request_id, most
        self._content = bytearray()
        coding = answer.headers.get("content-encoding", "identity")
        if coding.lower() not in CODINGS:
            self._refuse(f"Content-Encoding {coding}")

    def add(self, piece: bytes) -> None:
        size = len(self._content) + len(piece)
        if size > self._most:
            self._refuse(f"at least {size} bytes, the limit is {self._most} (max_answer_bytes)")
        self._content += piece

    def reply(self) -> Reply:
        """Return the whole reply, with the server's request id if that is a valid one."""
        found = self._answer.headers.get("x-request-id", "")
        request_id = found if REQUEST_ID.fullmatch(found) else self._id
        return Reply(self._answer.status_code, self._answer.headers, self._content, request_id)

    def _refuse(self, what: str) -> None:
        status = self._answer.status_code
        raise BadAnswer(f"an answer that cannot be used: status {status}, {what}", self._id)


def received(
    http: httpx.Client, request: httpx.Request, request_id: str, seconds: float, most: int
) -> Reply:
    """Send a request and return its reply.

    Args:
        request_id: of the request, for errors.
        seconds: for the whole of it.
        most: bytes of the unpacked body.

    Raises:
        httpx.RequestError: there is no whole answer, or not in time.
        BadAnswer: it is too large.
    """
    request.extensions["trace"] = _watch
    token = _until.set(monotonic() + seconds)
    try:
        with closing(http.send(request, stream=True)) as answer:
            body = _Received(answer, request_id, most)
            for piece in answer.iter_bytes():
                _left(None)  # a transport of the caller's own may have no connection to watch
                body.add(piece)
            return body.reply()
    finally:
        _until.reset(token)


async def received_async(
    http: httpx.AsyncClient, request: httpx.Request, request_id: str, seconds: float, most: int
) -> Reply:
    """Send a request and return its reply; see `received`."""
    try:
        async with (
            asyncio.timeout(seconds),
            aclosing(await http.send(request, stream=True)) as answer,
        ):
            body = _Received(answer, request_id, most)
            async for piece in answer.aiter_bytes():
                body.add(piece)
            return body.reply()
    except TimeoutError:
        raise httpx.ReadTimeout(f"no whole answer in {seconds:.3g} s", request=request) from None


def _watch(event: str, info: dict[str, Any]) -> None:
    """Give a new connection the time limits of all attempts that use it: a `trace` of httpx."""
    opened = ("connect_tcp.complete", "connect_unix_socket.complete", "start_tls.complete")
    if event.endswith(opened):
        stream = info["return_value"]
        stream.read = partial(_read, stream.read)
        stream.write = partial(_write, stream.write)


def _read(read: Any, max_bytes: int, timeout: float | None = None) -> bytes:
    found: bytes = read(max_bytes, _left(timeout))
    return found


def _write(write: Any, buffer: bytes, timeout: float | None = None) -> None:
    for start in range(0, len(buffer), WRITTEN):
        write(buffer[start : start + WRITTEN], _left(timeout))


def _left(timeout: float | None) -> float | None:
    """Return the seconds of the next wait; raise httpx.ReadTimeout if there are none left."""
    left = _until.get() - monotonic()
    if left <= 0:
        raise httpx.ReadTimeout("no whole answer in time")
    return timeout if left == inf else min(left, inf if timeout is None else timeout)
