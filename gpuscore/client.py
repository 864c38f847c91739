"""Clients of a gpuscore server: `Client`, and `AsyncClient` for asyncio.

A method sends its arguments as the body of its route, and returns the route's answer as the struct
that the server writes. The server checks what it gets; nothing is checked or divided here.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import wraps
from random import uniform
from threading import Thread
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import uuid4

import httpx
import msgspec

import gpuscore.dialects.answers as answers
import gpuscore.dialects.wire as wire

JITTER = 0.25  # most seconds; without them, clients that failed together would retry together
SHOWN = 1000  # characters of a server's text in an error
# Raised for bytes that are not JSON of the expected type, or are nested too deep.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

AnswerT = TypeVar("AnswerT")
ParamsP = ParamSpec("ParamsP")


class ClientError(Exception):
    """The base of all errors; the server's log has its `request_id`, too."""

    def __init__(self, message: str, request_id: str) -> None:
        super().__init__(f"{printable(message)} (request {request_id})")
        self.request_id = request_id


class StatusError(ClientError):
    """The server answered with an error.

    Attributes:
        status: the HTTP status.
        message: the server's message.
        code: the server's error code, such as "prompt_too_long"; None if a proxy answered.
        param: the field that caused the error, such as "items[3]"; or None.
    """

    def __init__(self, status: int, said: bytearray, request_id: str) -> None:
        self.status = status
        self.code = self.param = None
        try:
            error = msgspec.json.decode(said, type=wire.ErrorAnswer).error
        except UNREADABLE:  # not gpuscore's, maybe a proxy's
            self.message = printable(said[:SHOWN].decode(errors="replace"))
        else:
            self.message = printable(error.message)
            self.code = printable(error.code)
            self.param = error.param and printable(error.param)
        super().__init__(f"{status} {self.code or 'error'}: {self.message}", request_id)


class ConnectionFailed(ClientError):
    """There was no connection, or no complete answer before the deadline."""


class BadAnswer(ClientError):
    """The answer is too large, or is not that of a gpuscore server."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class AsyncClient(AbstractAsyncContextManager["AsyncClient"]):
    """A client of one gpuscore server. It is a context manager; tasks may share it.

    After 429 or 503 a request is sent again, not before the server's Retry-After and not after the
    call's deadline. All calls raise a ClientError (StatusError, ConnectionFailed or BadAnswer), and
    TypeError or ValueError for arguments that JSON cannot hold. A cancelled call closes its
    connection, and the server drops its work. `fields` are those of the route's body, such as
    `labels=["yes", "no"]`.

    Args:
        url: such as http://127.0.0.1:8000, with a path if the server has a prefix.
        api_key: sent as bearer token.
        deadline: seconds of a whole call, with its waits.
        max_answer_bytes: the limit of one answer; decoded, it may take sixteen times as much.
        **http: options of httpx.AsyncClient, such as `verify` for certificates, or `proxy`.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        deadline: float = 600.0,
        max_answer_bytes: int = 2**28,
        **http: Any,
    ) -> None:
        self._deadline = deadline
        self._most = max_answer_bytes
        # Decompression could take any memory and time, so answers must not be compressed.
        self._fields = {b"Accept-Encoding": b"identity", b"Content-Type": b"application/json"}
        if api_key is not None:
            self._fields[b"Authorization"] = b"Bearer " + api_key.encode()
        self._http = httpx.AsyncClient(base_url=url, timeout=None, **http)

    async def score(self, /, query: Any, items: Any, **fields: Any) -> answers.ScoreAnswer:
        """Return the labels' probabilities after each `query + item`: POST /v1/score."""
        body = {"query": query, "items": items, **fields}
        return await self._ask(answers.ScoreAnswer, "/v1/score", body)

    async def rerank(self, /, query: str, documents: Any, **fields: Any) -> answers.RerankAnswer:
        """Rank documents by relevance to a query, best first: POST /v1/rerank."""
        body = {"query": query, "documents": documents, **fields}
        return await self._ask(answers.RerankAnswer, "/v1/rerank", body)

    async def score_pairs(
        self, /, pairs: Sequence[tuple[str, str]], **fields: Any
    ) -> answers.PairsAnswer:
        """Score pairs of a query and a document: POST /v1/score."""
        body = {"queries": [one for one, _ in pairs], "documents": [two for _, two in pairs]}
        return await self._ask(answers.PairsAnswer, "/v1/score", {**body, **fields})

    async def classify(self, /, texts: Any, **fields: Any) -> answers.ClassifyAnswer:
        """Return the probability of each class: POST /v1/classify."""
        return await self._ask(answers.ClassifyAnswer, "/v1/classify", {"input": texts, **fields})

    async def completions(self, /, prompts: Any, **fields: Any) -> answers.CompletionAnswer:
        """Return the log-probabilities of prompts: POST /v1/completions; generates nothing."""
        whole = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 0}
        return await self._ask(answers.CompletionAnswer, "/v1/completions", {**whole, **fields})

    async def models(self) -> list[str]:
        """Return the names of the served models: GET /v1/models."""
        return [model.id for model in (await self._ask(_Models, "/v1/models", None)).data]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _ask(self, kind: type[AnswerT], path: str, body: dict[str, Any] | None) -> AnswerT:
        """Return the answer to a request; after 429 or 503, retry within the deadline."""
        verb, sent = ("GET", None) if body is None else ("POST", as_json(body))
        request_id = uuid4().hex
        now = asyncio.get_running_loop().time
        head = {**self._fields, b"X-Request-Id": request_id.encode()}
        until = now() + self._deadline
        try:
            async with asyncio.timeout_at(until):
                while True:
                    async with self._http.stream(verb, path, content=sent, headers=head) as answer:
                        said = await self._read_body(answer, request_id)
                    if answer.status_code == 200:
                        return msgspec.json.decode(said, type=kind)
                    wait = answer.headers.get("retry-after", "")
                    seconds = uniform(0, JITTER) + (float(wait) if wait.isdecimal() else 1.0)
                    if answer.status_code not in (429, 503) or now() + seconds >= until:
                        raise StatusError(answer.status_code, said, request_id)
                    await asyncio.sleep(seconds)
        except UNREADABLE as error:  # from None: this error and the next may quote the server
            raise BadAnswer(f"not a {kind.__name__}: {error}", request_id) from None
        except (httpx.RequestError, TimeoutError) as error:
            raise ConnectionFailed(f"no complete answer: {error!r}", request_id) from None

    async def _read_body(self, answer: httpx.Response, request_id: str) -> bytearray:
        said = bytearray()
        async for piece in answer.aiter_raw():
            said += piece
            if len(said) > self._most:
                raise BadAnswer(f"over {self._most} bytes (max_answer_bytes)", request_id)
        return said


def _blocking(
    method: Callable[Concatenate[Any, ParamsP], Coroutine[Any, Any, AnswerT]],
) -> Callable[Concatenate[Any, ParamsP], AnswerT]:
    """Return a method of AsyncClient for Client, which waits for its result."""

    @wraps(method)
    def call(self: "Client", /, *args: ParamsP.args, **kwargs: ParamsP.kwargs) -> AnswerT:
        return self._wait(method(self._client, *args, **kwargs))

    return call


class Client(AbstractContextManager["Client"]):
    """`AsyncClient` without asyncio: the same arguments, methods, answers and errors.

    Threads may share it, and a program that runs an event loop may use it: its requests run in a
    thread of its own, which ends with `close`. A forked process needs a client of its own.
    """

    def __init__(self, url: str, api_key: str | None = None, **options: Any) -> None:
        self._client = AsyncClient(url, api_key, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="gpuscore client", daemon=True)
        self._thread.start()

    score = _blocking(AsyncClient.score)
    rerank = _blocking(AsyncClient.rerank)
    score_pairs = _blocking(AsyncClient.score_pairs)
    classify = _blocking(AsyncClient.classify)
    completions = _blocking(AsyncClient.completions)
    models = _blocking(AsyncClient.models)

    def close(self) -> None:
        """Close the connections, and end the thread."""
        if not self._loop.is_closed():
            self._wait(self._client.aclose())
            self._wait(self._loop.shutdown_asyncgens())  # those of answers not read to the end
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, call: Coroutine[Any, Any, AnswerT]) -> AnswerT:
        """Return the result of a call; cancel the call if this thread is interrupted."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()


def printable(text: str) -> str:
    """Return a server's text for a terminal: the beginning, without control characters."""
    return "".join(c if c.isprintable() else " " for c in text[:SHOWN])


def as_json(body: dict[str, Any]) -> bytes:
    """Encode a body; arrays and numbers of NumPy and series of pandas become lists and numbers."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, default=_as_builtin).encode()


def _as_builtin(value: Any) -> Any:
    if not hasattr(value, "tolist"):
        raise TypeError(f"an object of type {type(value).__name__} is no JSON")
    return value.tolist()
