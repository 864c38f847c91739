"""One model being served: from a decoded body to an answer."""

import asyncio
import hashlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, Protocol, TypeVar

import msgspec

from gpuscore.engine.admission import Backlog
from gpuscore.engine.scores import (
    check_temperature,
    label_logprobs,
    label_mass,
    label_scores,
)
from gpuscore.errors import (
    GpuscoreError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from gpuscore.families.prompts import FamilyPrompts
from gpuscore.server.bridge import Bridge
from gpuscore.server.record import ENGINE, RESPOND, TOKENIZE, RequestRecord
from gpuscore.server.rerank import Ranking, RerankBody, encode_ranking, to_rerank_input
from gpuscore.server.schema import (
    PromptTokensDetails,
    ScoreAnswer,
    ScoreBody,
    Usage,
    to_input,
)
from gpuscore.text.prompts import PromptBuilder, ScoreInput
from gpuscore.types import BackendLimits, EngineStats, ScoreRequest, ScoreResult

ResultT = TypeVar("ResultT")

DEFAULT_MODEL = "default"
NO_RERANKER = (
    "this model is of no known family of rerankers, so its prompt is not known; start the server "
    "with --reranker, or use /v1/score"
)
LOADING_RETRY_AFTER = 5  # seconds
ANSWERS = 16  # of the engine, that a round of the event loop takes in

# Up to here a request of token ids is worked on in about a millisecond, on the event loop itself.
SMALL_ITEMS = 64
SMALL_TOKENS = 4096


class ScoringEngine(Protocol):
    """What the server needs of `Engine` and `EngineClient`."""

    @property
    def limits(self) -> BackendLimits: ...

    @property
    def alive(self) -> bool: ...

    @property
    def backlog(self) -> Backlog: ...

    def score_all(
        self, requests: list[ScoreRequest]
    ) -> "list[Future[ScoreResult] | GpuscoreError]": ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What is there once the model's weights are in and warm.

    `wait_ended` blocks until the engine is closed; it raises once the engine has failed for good.
    """

    engine: ScoringEngine
    builder: PromptBuilder
    wait_ended: Callable[[], None] = lambda: None
    reranker: FamilyPrompts | None = None


class ScoringService:
    """Serves one model, from before it is loaded until after it is drained."""

    def __init__(
        self,
        names: tuple[str, ...],
        max_inflight_per_key: int,
        max_queue_seconds: float = math.inf,
    ) -> None:
        self.names = names  # first the one shown in /v1/models
        self.model: LoadedModel | None = None
        self.draining = False
        self.abandoned = False
        self.failed = False
        self.answers_per_round: Callable[[], int] = lambda: ANSWERS  # that the loop takes in
        self.turns = 0  # requests that are complete and wait until their work is begun
        self._max_inflight, self._max_wait = max_inflight_per_key, max_queue_seconds
        self._inflight: Counter[str] = Counter()
        self._handlers: set[asyncio.Task[Any]] = set()
        self._bridge: Bridge | None = None
        # Text and all that is large is worked on here, never on the event loop.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")

    @property
    def healthy(self) -> bool:
        return not self.failed and (self.model is None or self.model.engine.alive)

    @property
    def ready(self) -> bool:
        return self.model is not None and self.healthy and not self.draining

    @property
    def busy(self) -> bool:
        """Whether a request that came before the drain is not answered yet."""
        return bool(self._handlers) or self.turns > 0

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Around the handling of a request, from its arrival to its answer."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  (a handler runs in a task)
        self._handlers.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.abandoned:
                raise
            task.uncancel()
            raise self.shutting_down() from None
        finally:
            self._handlers.discard(task)

    def abandon(self) -> None:
        """Answer what is in flight with `Unavailable`, in the event loop's next round."""
        self.abandoned = True
        for task in self._handlers:
            task.cancel()

    def shutting_down(self) -> Unavailable:
        return Unavailable("the server is shutting down", retry_after=LOADING_RETRY_AFTER)

    async def score(
        self, body: ScoreBody, tenant: str, deadline: float, record: RequestRecord
    ) -> bytes:
        """The answer as JSON.

        Args:
            body: what the caller sent.
            tenant: whose request it is.
            deadline: on time.monotonic's clock; what has not run then need not run.
            record: gets the sizes and the stages.

        Raises:
            GpuscoreError: the subclass that the wire contract names.
        """
        given = to_input(body)
        record.items = len(given.items)
        temperature = 1.0 if body.temperature is None else body.temperature
        check_temperature(temperature, body.softmax)
        name = self._name(body.model)
        model = self._loaded()
        with self._admitted(tenant):
            with record.stage(TOKENIZE):
                request = await self._build(model.builder, given)
            result = None
            if request is not None:
                salt = cache_salt(tenant, body.cache_salt)
                request = replace(request, salt=salt, deadline=deadline)
                result = await self._run(model, request, record)
            with record.stage(RESPOND):
                answer = partial(_answer, name, body, request, result, temperature)
                small = request is None or len(request.item_ids) <= SMALL_ITEMS
                encoded, usage = answer() if small else await self._in_thread(answer)
            record.prompt_tokens = usage.prompt_tokens
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens
            return encoded

    async def rerank(
        self, body: RerankBody, tenant: str, deadline: float, record: RequestRecord
    ) -> bytes:
        """As `score`, for a query and documents.

        Raises:
            GpuscoreError: also where the model is of no known family of rerankers.
        """
        given = to_rerank_input(body)
        record.items = len(given.documents)
        name = self._name(body.model)
        model = self._loaded()
        if model.reranker is None:
            raise InvalidRequest(NO_RERANKER)
        with self._admitted(tenant):
            with record.stage(TOKENIZE):
                built = await self._in_time(partial(model.reranker.build, given))
            salt = cache_salt(tenant, body.cache_salt)
            request = replace(built.request, salt=salt, deadline=deadline)
            result = await self._run(model, request, record)
            with record.stage(RESPOND):
                raw = model.reranker.raw_scores(result)
                scores = raw if body.wants_raw else model.reranker.family.relevance(raw)
                tokens = request.num_prompt_tokens
                record.prompt_tokens = tokens
                record.cached_tokens = cached_tokens(request, result)
                ranking = Ranking(name, record.request_id, scores, built.truncated, tokens)
                encode = partial(encode_ranking, body, ranking)
                small = len(given.documents) <= SMALL_ITEMS
                return encode() if small else await self._in_thread(encode)

    async def _run(
        self, model: "LoadedModel", request: ScoreRequest, record: RequestRecord
    ) -> ScoreResult:
        """Hand a request to the engine and wait for it."""
        submitted = monotonic()
        deadline = math.inf if request.deadline is None else request.deadline
        longest = min(self._max_wait, deadline - submitted)
        refusal = model.engine.backlog.wait_refusal(request.num_tokens, longest)
        if refusal is not None:
            raise refusal
        result = await self._bridge_to(model.engine).score(request, partial(_taken, record))
        record.engine_stages(submitted, result.timings)
        return result

    def _name(self, wanted: str | None) -> str:
        name = DEFAULT_MODEL if wanted is None else wanted
        if name not in (DEFAULT_MODEL, *self.names):
            raise ModelNotFound(f"this server has one model: {self.names[0]}", param="model")
        return name

    def _bridge_to(self, engine: ScoringEngine) -> Bridge:
        if self._bridge is None or self._bridge.loop is not asyncio.get_running_loop():
            self._bridge = Bridge(engine, self.answers_per_round)
        return self._bridge

    async def _build(self, builder: PromptBuilder, given: ScoreInput) -> ScoreRequest | None:
        if _is_small(given):
            return builder.build(given)
        return await self._in_time(partial(builder.build, given))

    async def _in_time(self, build: Callable[[Callable[[], bool]], ResultT]) -> ResultT:
        """`build` in a thread, told when nobody waits for it any more."""
        given_up = threading.Event()
        try:
            return await self._in_thread(partial(build, given_up.is_set))
        finally:
            given_up.set()  # a thread cannot be cancelled, only told

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.model is not None:
            self.model.engine.close()

    def _loaded(self) -> LoadedModel:
        if self.model is None:
            raise Unavailable("the model is loading", retry_after=LOADING_RETRY_AFTER)
        if not self.model.engine.alive:  # before any work on its text
            raise Unavailable("the engine is not running", retry_after=LOADING_RETRY_AFTER)
        return self.model

    @contextmanager
    def _admitted(self, tenant: str) -> Iterator[None]:
        if self._inflight[tenant] >= self._max_inflight:
            raise Overloaded(
                f"{self._inflight[tenant]} requests of this API key are in flight", retry_after=1
            )
        self._inflight[tenant] += 1
        try:
            yield
        finally:
            self._inflight[tenant] -= 1
            if not self._inflight[tenant]:
                del self._inflight[tenant]


def cache_salt(tenant: str, given: str | None) -> str:
    """What has to be equal for two requests to share a cached prefix.

    Always the key's owner: a hit shows in `cached_tokens` and in time, so a shared cache would tell
    one key's holder what another's has asked. The caller's salt only narrows that further. Hashed,
    so that neither a caller's text nor a key's digest goes any further.
    """
    return hashlib.sha256(f"{tenant}:{given or ''}".encode()).hexdigest()


def cached_tokens(request: ScoreRequest, result: ScoreResult) -> int:
    """Tokens of the prompts that no forward pass computed for this request."""
    return max(0, request.num_prompt_tokens - result.computed_tokens)


def _is_small(given: ScoreInput) -> bool:
    """Whether a request takes less time to build than to hand to a thread and back; never text."""
    if given.labels is not None or len(given.items) > SMALL_ITEMS:
        return False
    if any(isinstance(item, str) for item in given.items):
        return False
    return len(given.query) + sum(map(len, given.items)) <= SMALL_TOKENS


def _taken(record: RequestRecord) -> None:
    record.progress = ENGINE


def _answer(
    name: str,
    body: ScoreBody,
    request: ScoreRequest | None,
    result: ScoreResult | None,
    temperature: float,
) -> tuple[bytes, Usage]:
    """The answer as JSON, and what it says of the tokens."""
    if request is None or result is None:
        answer = _empty_answer(name, body)
    else:
        answer = _full_answer(name, body, request, result, temperature)
    return msgspec.json.encode(answer), answer.usage


def _full_answer(
    name: str, body: ScoreBody, request: ScoreRequest, result: ScoreResult, temperature: float
) -> ScoreAnswer:
    rows = label_scores(result, apply_softmax=body.softmax, temperature=temperature)
    logprobs = mass = None
    if body.return_label_logprobs:
        logprobs = [row.tolist() for row in label_logprobs(result)]
    if body.return_label_mass:
        mass = label_mass(result, request.label_ids).tolist()
    prompt_tokens = request.num_prompt_tokens
    cached = cached_tokens(request, result)
    scores = [row.tolist() for row in rows]
    return ScoreAnswer(scores, name, _usage(prompt_tokens, cached), "scoring", logprobs, mass)


def _empty_answer(name: str, body: ScoreBody) -> ScoreAnswer:
    logprobs: list[list[float]] | None = [] if body.return_label_logprobs else None
    mass: list[float] | None = [] if body.return_label_mass else None
    return ScoreAnswer([], name, _usage(0, 0), "scoring", logprobs, mass)


def _usage(prompt_tokens: int, cached_tokens: int) -> Usage:
    return Usage(prompt_tokens, prompt_tokens, 0, PromptTokensDetails(cached_tokens))
