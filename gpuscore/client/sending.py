"""Sending the requests of a call, and receiving each answer within a time and a size.

The times of httpx are of single reads and writes, so a server that sends a byte now and then would
hold a call for hours. asyncio can end any wait. A blocking call ends in time because its connection
gives each read and write only the time that is left.
"""

import asyncio
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import aclosing, closing
from contextvars import ContextVar
from functools import partial
from math import inf
from time import monotonic
from typing import Any, ClassVar, Generic, Self, TypeVar, Unpack

import httpx

from gpuscore.client.calls import ClientCall, Post, models_call, new_id
from gpuscore.client.errors import REQUEST_ID, BadAnswer, ClientError, StatusError
from gpuscore.client.options import LATE, ClientOptions, settings_of
from gpuscore.client.results import Model
from gpuscore.client.retries import Attempts, Reply
from gpuscore.types.call_arguments import awaited

CODINGS = ("identity", "gzip", "deflate")  # httpx unpacks these piece by piece
WRITTEN = 2**14  # bytes that a socket takes at once, so that no write waits twice
_until = ContextVar("_until", default=inf)  # on the clock `monotonic`, of this thread's attempt


class _Received:
    """An answer's body as it arrives; raises BadAnswer once the body is over `most` bytes."""

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
        told = self._answer.headers.get("x-request-id", "")
        request_id = told if REQUEST_ID.fullmatch(told) else self._id
        return Reply(self._answer.status_code, self._answer.headers, self._content, request_id)

    def _refuse(self, what: str) -> None:
        status = self._answer.status_code
        raise BadAnswer(f"an answer that cannot be used: status {status}, {what}", self._id)


def _watch(event: str, info: dict[str, Any]) -> None:
    """Give a new connection the time limits of all attempts that use it: a `trace` of httpx."""
    opened = ("connect_tcp.complete", "connect_unix_socket.complete", "start_tls.complete")
    if event.endswith(opened):
        stream = info["return_value"]
        stream.read = partial(_read, stream.read)
        stream.write = partial(_write, stream.write)


def _read(read: Any, max_bytes: int, timeout: float | None = None) -> bytes:
    content: bytes = read(max_bytes, _left(timeout))
    return content


def _write(write: Any, buffer: bytes, timeout: float | None = None) -> None:
    for start in range(0, len(buffer), WRITTEN):
        write(buffer[start : start + WRITTEN], _left(timeout))


def _left(timeout: float | None) -> float | None:
    """Return the seconds of the next wait; raise httpx.ReadTimeout if there are none left."""
    left = _until.get() - monotonic()
    if left <= 0:
        raise httpx.ReadTimeout("no whole answer in time")
    return timeout if left == inf else min(left, inf if timeout is None else timeout)


ResultT = TypeVar("ResultT")
HttpT = TypeVar("HttpT", httpx.Client, httpx.AsyncClient)


class SenderBase(Generic[HttpT]):
    """The base of both senders: settings, and a client of httpx, which may be the caller's own."""

    _opened: ClassVar[type[Any]]

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        http: HttpT | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._settings = settings_of(url, api_key, options)
        self._own = http is None
        self._http: HttpT = self._opened() if http is None else http

    def _readiness(self) -> tuple[httpx.Request, str, float]:
        """Return the request that asks whether the server is ready, its id and its time limit."""
        request_id, seconds = new_id(), self._settings.policy.deadline
        fields = {"X-Request-Id": request_id}
        request = self._settings.request("GET", "/ready", fields, seconds, None)
        return request, request_id, seconds

    def _attempt(
        self, part: Post, content: bytes | None, call: Attempts
    ) -> tuple[httpx.Request, str, float]:
        """Return the next attempt of a request, its id and the seconds to wait for its answer."""
        fields, seconds = call.begin(monotonic())
        method = "GET" if content is None else "POST"
        request = self._settings.request(method, part.path, fields, seconds, content)
        return request, part.request_id, seconds


class Sender(SenderBase[httpx.Client]):
    """The base of `Client`."""

    _opened = httpx.Client

    def models(self) -> tuple[Model, ...]:
        """Return the served models. Raises ClientError."""
        return self._do(models_call())

    def ready(self) -> bool:
        """Return True if the server takes requests now; asks once."""
        try:
            return self._exchange(*self._readiness()).status == 200
        except (httpx.RequestError, BadAnswer):
            return False

    def close(self) -> None:
        """Close the connections; a caller's own httpx.Client stays open."""
        if self._own:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, job: ClientCall[ResultT]) -> ResultT:
        until, given_up = monotonic() + self._settings.policy.deadline, threading.Event()
        failures: list[ClientError] = []

        def send(part: Post) -> Reply:
            try:
                return self._send(part, until, given_up)
            except ClientError as error:
                shown = error.moved(part.first) if isinstance(error, StatusError) else error
                failures.append(shown)
                raise shown from None

        if len(job.parts) == 1:
            return job.join([send(job.parts[0])])
        with ThreadPoolExecutor(self._settings.concurrency) as pool:
            futures = [pool.submit(send, part) for part in job.parts]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                given_up.set()  # stops the remaining parts, whose results would not be used
        if failures:
            raise failures[0]
        return job.join([future.result() for future in futures])

    def _send(self, part: Post, until: float, given_up: threading.Event) -> Reply:
        content = part.content and part.content()
        call = Attempts(self._settings.policy, part.request_id, until)
        seconds = 0.0
        while not given_up.wait(seconds):
            try:
                reply = self._exchange(*self._attempt(part, content, call))
            except httpx.RequestError as error:
                seconds = call.failed(error, monotonic(), late=isinstance(error, LATE))
            else:
                pause = call.answered(reply, monotonic())
                if pause is None:
                    return reply
                seconds = pause
        why = "given up, because another part of the call failed"
        raise ClientError(why, part.request_id)

    def _exchange(self, request: httpx.Request, request_id: str, seconds: float) -> Reply:
        """Send a request and return its reply.

        Args:
            request_id: of the request, for errors.
            seconds: for the whole of it.

        Raises:
            httpx.RequestError: there is no whole answer, or not in time.
            BadAnswer: it is too large.
        """
        request.extensions["trace"] = _watch
        token = _until.set(monotonic() + seconds)
        try:
            with closing(self._http.send(request, stream=True)) as answer:
                body = _Received(answer, request_id, self._settings.max_answer_bytes)
                for piece in answer.iter_bytes():
                    _left(None)  # a transport of the caller's own may have no connection to watch
                    body.add(piece)
                return body.reply()
        finally:
            _until.reset(token)


class AsyncSender(SenderBase[httpx.AsyncClient]):
    """The base of `AsyncClient`."""

    _opened = httpx.AsyncClient
    models = awaited(Sender.models)

    async def ready(self) -> bool:
        """Return True if the server takes requests now; see `Sender.ready`."""
        try:
            return (await self._exchange(*self._readiness())).status == 200
        except (httpx.RequestError, BadAnswer):
            return False

    async def aclose(self) -> None:
        """Close the connections; a caller's own httpx.AsyncClient stays open."""
        if self._own:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _do(self, job: ClientCall[ResultT]) -> ResultT:
        until = monotonic() + self._settings.policy.deadline
        room = asyncio.Semaphore(self._settings.concurrency)

        async def send(part: Post) -> Reply:
            async with room:
                try:
                    return await self._send(part, until)
                except StatusError as error:
                    raise error.moved(part.first) from None

        tasks = [asyncio.ensure_future(send(part)) for part in job.parts]
        try:
            return job.join(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, part: Post, until: float) -> Reply:
        content = part.content and part.content()
        call = Attempts(self._settings.policy, part.request_id, until)
        while True:
            try:
                reply = await self._exchange(*self._attempt(part, content, call))
            except httpx.RequestError as error:
                seconds = call.failed(error, monotonic(), late=isinstance(error, LATE))
            else:
                pause = call.answered(reply, monotonic())
                if pause is None:
                    return reply
                seconds = pause
            await asyncio.sleep(seconds)

    async def _exchange(self, request: httpx.Request, request_id: str, seconds: float) -> Reply:
        """Send a request and return its reply; see `Sender._exchange`."""
        try:
            async with (
                asyncio.timeout(seconds),
                aclosing(await self._http.send(request, stream=True)) as answer,
            ):
                body = _Received(answer, request_id, self._settings.max_answer_bytes)
                async for piece in answer.aiter_bytes():
                    body.add(piece)
                return body.reply()
        except TimeoutError:
            late = f"no whole answer in {seconds:.3g} s"
            raise httpx.ReadTimeout(late, request=request) from None
