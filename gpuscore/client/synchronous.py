"""The blocking client."""

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
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
from gpuscore.client.errors import ClientError
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


class Client:
    """A client of one gpuscore server. It is a context manager; threads may share it.

    429, 502, 503 and connection errors are retried, up to `max_attempts` attempts in all, not
    before the server's Retry-After and not after the call's `deadline`. Other errors are not
    retried. Lists that are too long for one request are split by number and by bytes, and their
    answers are joined to one result.

    Args:
        url: such as http://127.0.0.1:8000, with a path if the server has a prefix.
        api_key: sent as bearer token.
        http: the caller's own httpx.Client, for proxies or certificates; it is not closed.
        **options: see `ClientOptions`.

    Raises:
        ValueError: an option is out of range, or the URL is invalid.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        http: httpx.Client | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._settings = settings_of(url, api_key, **options)
        self._own = http is None
        self._http = httpx.Client() if http is None else http

    def score(
        self,
        query: str | Ids,
        items: str | Sequence[str] | Sequence[Ids],
        **options: Unpack[ScoreOptions],
    ) -> ScoreResponse:
        """Return the labels' probabilities after each `query + item` prompt.

        Args:
            query: the text or token ids that all items share.
            items: texts if the query is a text, lists of token ids if it is one.
            **options: see `ScoreOptions`.

        Raises:
            ClientError: StatusError, ConnectionFailed or BadAnswer.
            ValueError: there are lists of labels, but not one for each item.
        """
        return self._do(score_call(self._settings.limits, query, items, **options))

    def rerank(
        self, query: str, documents: Sequence[Document], **options: Unpack[RerankOptions]
    ) -> RerankResponse:
        """Rank documents by relevance to a query, best first.

        Args:
            query: the text to rank by.
            documents: texts, or mappings with `text` or with `rank_fields`.
            **options: see `RerankOptions`.

        Raises:
            ClientError: StatusError, ConnectionFailed or BadAnswer.
        """
        return self._do(rerank_call(self._settings.limits, query, documents, **options))

    def models(self) -> tuple[Model, ...]:
        """Return the served models. Raises ClientError."""
        until = monotonic() + self._settings.policy.deadline
        return models_of(self._send("GET", "/v1/models", None, new_id(), until))

    def ready(self) -> bool:
        """Return True if the server takes requests now; asks once."""
        request_id = new_id()
        seconds = self._settings.policy.deadline
        fields = {"X-Request-Id": request_id}
        try:
            answer = self._http.send(self._settings.request("GET", "/ready", fields, seconds, None))
        except httpx.RequestError:
            return False
        return answer.status_code == 200

    def close(self) -> None:
        """Close the connections, except those of the caller's own httpx.Client."""
        if self._own:
            self._http.close()

    def __enter__(self) -> "Client":
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
                failures.append(error)
                raise

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
            request = self._settings.request(method, path, *call.begin(monotonic()), content)
            try:
                answer = self._http.send(request)
            except httpx.RequestError as error:
                seconds = call.failed(error, monotonic(), late=isinstance(error, LATE))
            else:
                reply = reply_of(answer, request_id)
                pause = call.answered(reply, monotonic())
                if pause is None:
                    return reply
                seconds = pause
        raise ClientError("given up, because another part of the call failed", request_id)
