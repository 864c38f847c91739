"""The client for asyncio."""

import asyncio
from collections.abc import Sequence
from time import monotonic
from types import TracebackType
from typing import TypeVar, Unpack

import httpx

from gpuscore.client.calls import (
    ClientCall,
    Post,
    models_of,
    new_id,
    rerank_call,
    score_call,
)
from gpuscore.client.options import (
    LATE,
    ClientOptions,
    RerankOptions,
    ScoreOptions,
    reply_of,
    settings_of,
)
from gpuscore.client.results import Document, Ids, Model, RerankResponse, ScoreResponse
from gpuscore.client.retries import Attempts, Reply

ResultT = TypeVar("ResultT")


class AsyncClient:
    """`Client` for asyncio: same arguments (`http` is an httpx.AsyncClient), results and errors.

    Tasks may share it. Cancelling a call closes its requests, and the server drops their work.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        http: httpx.AsyncClient | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._settings = settings_of(url, api_key, **options)
        self._own = http is None
        self._http = httpx.AsyncClient() if http is None else http

    async def score(
        self,
        query: str | Ids,
        items: str | Sequence[str] | Sequence[Ids],
        **options: Unpack[ScoreOptions],
    ) -> ScoreResponse:
        """Score items; see `Client.score`."""
        return await self._do(score_call(self._settings.limits, query, items, **options))

    async def rerank(
        self, query: str, documents: Sequence[Document], **options: Unpack[RerankOptions]
    ) -> RerankResponse:
        """Rank documents; see `Client.rerank`."""
        return await self._do(rerank_call(self._settings.limits, query, documents, **options))

    async def models(self) -> tuple[Model, ...]:
        """Return the served models; see `Client.models`."""
        until = monotonic() + self._settings.policy.deadline
        return models_of(await self._send("GET", "/v1/models", None, new_id(), until))

    async def ready(self) -> bool:
        """Return True if the server takes requests now; see `Client.ready`."""
        request_id = new_id()
        seconds = self._settings.policy.deadline
        fields = {"X-Request-Id": request_id}
        request = self._settings.request("GET", "/ready", fields, seconds, None)
        try:
            answer = await self._http.send(request)
        except httpx.RequestError:
            return False
        return answer.status_code == 200

    async def aclose(self) -> None:
        """Close the connections, except those of the caller's own httpx.AsyncClient."""
        if self._own:
            await self._http.aclose()

    async def __aenter__(self) -> "AsyncClient":
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
                return await self._send("POST", part.path, content, part.request_id, until)

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
            request = self._settings.request(method, path, *call.begin(monotonic()), content)
            try:
                answer = await self._http.send(request)
            except httpx.RequestError as error:
                seconds = call.failed(error, monotonic(), late=isinstance(error, LATE))
            else:
                reply = reply_of(answer, request_id)
                pause = call.answered(reply, monotonic())
                if pause is None:
                    return reply
                seconds = pause
            await asyncio.sleep(seconds)
