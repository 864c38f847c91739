"""Sending the requests of a call and waiting for their answers: the base of both clients."""

import asyncio
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from time import monotonic
from types import TracebackType
from typing import Self, TypeVar, Unpack

import httpx

from gpuscore.client.calls import ClientCall, Post, models_of, new_id
from gpuscore.client.errors import BadAnswer, ClientError, StatusError
from gpuscore.client.options import LATE, ClientOptions, settings_of
from gpuscore.client.receiving import received, received_async
from gpuscore.client.results import Model
from gpuscore.client.retries import Attempts, Reply

ResultT = TypeVar("ResultT")


class Sender:
    """The base of `Client`."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        http: httpx.Client | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._settings = settings_of(url, api_key, options)
        self._own = http is None
        self._http = httpx.Client() if http is None else http

    def models(self) -> tuple[Model, ...]:
        """Return the served models. Raises ClientError."""
        until = monotonic() + self._settings.policy.deadline
        return models_of(self._send("GET", "/v1/models", None, new_id(), until))

    def ready(self) -> bool:
        """Return True if the server takes requests now; asks once."""
        request_id = new_id()
        seconds = self._settings.policy.deadline
        fields = {"X-Request-Id": request_id}
        request = self._settings.request("GET", "/ready", fields, seconds, None)
        try:
            reply = self._exchange(request, request_id, seconds)
        except (httpx.RequestError, BadAnswer):
            return False
        return reply.status == 200

    def close(self) -> None:
        """Close the connections, except those of the caller's own httpx.Client."""
        if self._own:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _do(self, job: ClientCall[ResultT]) -> ResultT:
        until, given_up = monotonic() + self._settings.policy.deadline, threading.Event()
        failures: list[ClientError] = []

        def send(part: Post) -> Reply:
            try:
                content = part.content()
                return self._send("POST", part.path, content, part.request_id, until, given_up)
            except ClientError as error:
                shown = part.in_whole(error) if isinstance(error, StatusError) else error
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

    def _send(
        self,
        method: str,
        path: str,
        content: bytes | None,
        request_id: str,
        until: float,
        given_up: threading.Event | None = None,
    ) -> Reply:
        call = Attempts(self._settings.policy, request_id, until)
        waiting = given_up or threading.Event()
        seconds = 0.0
        while not waiting.wait(seconds):
            fields, most = call.begin(monotonic())
            request = self._settings.request(method, path, fields, most, content)
            try:
                reply = self._exchange(request, request_id, most)
            except httpx.RequestError as error:
                seconds = call.failed(error, monotonic(), late=isinstance(error, LATE))
            else:
                pause = call.answered(reply, monotonic())
                if pause is None:
                    return reply
                seconds = pause
        raise ClientError("given up, because another part of the call failed", request_id)

    def _exchange(self, request: httpx.Request, request_id: str, seconds: float) -> Reply:
        return received(self._http, request, request_id, seconds, self._settings.max_answer_bytes)


class AsyncSender:
    """The base of `AsyncClient`."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        http: httpx.AsyncClient | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._settings = settings_of(url, api_key, options)
        self._own = http is None
        self._http = httpx.AsyncClient() if http is None else http

    async def models(self) -> tuple[Model, ...]:
        """Return the served models; see `Sender.models`."""
        until = monotonic() + self._settings.policy.deadline
        return models_of(await self._send("GET", "/v1/models", None, new_id(), until))

    async def ready(self) -> bool:
        """Return True if the server takes requests now; see `Sender.ready`."""
        request_id = new_id()
        seconds = self._settings.policy.deadline
        fields = {"X-Request-Id": request_id}
        request = self._settings.request("GET", "/ready", fields, seconds, None)
        try:
            reply = await self._exchange(request, request_id, seconds)
        except (httpx.RequestError, BadAnswer):
            return False
        return reply.status == 200

    async def aclose(self) -> None:
        """Close the connections, except those of the caller's own httpx.AsyncClient."""
        if self._own:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _do(self, job: ClientCall[ResultT]) -> ResultT:
        until = monotonic() + self._settings.policy.deadline
        room = asyncio.Semaphore(self._settings.concurrency)

        async def send(part: Post) -> Reply:
            async with room:
                content = part.content()
                try:
                    return await self._send("POST", part.path, content, part.request_id, until)
                except StatusError as error:
                    raise part.in_whole(error) from None

        tasks = [asyncio.ensure_future(send(part)) for part in job.parts]
        try:
            return job.join(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(
        self, method: str, path: str, content: bytes | None, request_id: str, until: float
    ) -> Reply:
        call = Attempts(self._settings.policy, request_id, until)
        while True:
            fields, most = call.begin(monotonic())
            request = self._settings.request(method, path, fields, most, content)
            try:
                reply = await self._exchange(request, request_id, most)
            except httpx.RequestError as error:
                seconds = call.failed(error, monotonic(), late=isinstance(error, LATE))
            else:
                pause = call.answered(reply, monotonic())
                if pause is None:
                    return reply
                seconds = pause
            await asyncio.sleep(seconds)

    async def _exchange(self, request: httpx.Request, request_id: str, seconds: float) -> Reply:
        most = self._settings.max_answer_bytes
        return await received_async(self._http, request, request_id, seconds, most)
