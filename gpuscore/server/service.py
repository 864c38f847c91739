"""One model being served: who may use it, its threads, and the way to its engine."""

import asyncio
import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, Protocol, TypeVar

from gpuscore.engine.admission import Backlog
from gpuscore.errors import GpuscoreError, ModelNotFound, Unavailable
from gpuscore.limits import BackendLimits
from gpuscore.prompts.decisions import DecisionPrompts
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.files import ClassifierHead
from gpuscore.request import ScoreRequest, ScoreResult
from gpuscore.server.bridge import Bridge
from gpuscore.server.memory import LARGE, Trimmer
from gpuscore.server.observe.record import ENGINE, RequestRecord
from gpuscore.server.text_work import TextWork
from gpuscore.stats import EngineStats
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.tokenizer_info import TokenizerInfo
from gpuscore.text.turns import Turns

ResultT = TypeVar("ResultT")

DEFAULT_MODEL = "default"
LOADING_RETRY_AFTER = 5  # seconds
ANSWERS = 16  # of the engine, that a round of the event loop takes in

# Up to here a request of token ids is worked on in about a millisecond, on the event loop itself.
SMALL_ITEMS, SMALL_TOKENS = 64, 4096


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
    family: FamilyPrompts | None = None
    head: ClassifierHead | None = None
    about: str = ""  # number format and device, for people
    decisions: DecisionPrompts | str = "not prepared"  # or why there are none
    tokenizer_info: TokenizerInfo | None = None  # None: the model has no tokenizer

    @property
    def default_labels(self) -> list[int] | None:
        """What /v1/score asks for where a body names no labels; None: it must name some."""
        if self.family is not None:
            return self.family.label_ids
        classes = self.engine.limits.classes
        return None if classes is None else list(range(len(classes)))


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request beside its body.

    Args:
        tenant: whose it is.
        deadline: on time.monotonic's clock; what has not run then need not run.
        record: gets the sizes and the stages.
        path: at which it came.
    """

    tenant: str
    deadline: float
    record: RequestRecord
    path: str


class ScoringService:
    """Serves one model, from before it is loaded until after it is drained.

    Args:
        names: the model's names on the wire, first the one shown in /v1/models.
        max_queue_seconds: that a request may have to wait for the engine.
        answers_per_round: answers of the engine that the next round of the event loop takes in.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        max_queue_seconds: float = math.inf,
        answers_per_round: Callable[[], int] = lambda: ANSWERS,
    ) -> None:
        self.names = names
        self.model: LoadedModel | None = None
        self.draining = False
        self.abandoned = False
        self.failed = False
        self._max_wait, self._answers_per_round = max_queue_seconds, answers_per_round
        self._handlers: set[asyncio.Task[Any]] = set()
        self._bridge: Bridge | None = None
        # Text and all that is large is worked on here, never on the event loop.
        self._text = TextWork(self._text_ended)
        self.memory = Trimmer(self._in_background)
        self._loop: asyncio.AbstractEventLoop | None = None  # that has handed in text

    @property
    def healthy(self) -> bool:
        return not self.failed and (self.model is None or self.model.engine.alive)

    @property
    def ready(self) -> bool:
        return self.model is not None and self.healthy and not self.draining

    @property
    def busy(self) -> bool:
        """Whether a request is being worked on."""
        return bool(self._handlers)

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

    def serve(self, model: LoadedModel) -> None:
        """The model is loaded and warm."""
        self.model = model

    def fail(self) -> None:
        """There is no engine, and there will be none."""
        self.failed = True

    def drain(self) -> None:
        """Answer what has come, and nothing that comes from now on."""
        self.draining = True

    def abandon(self) -> None:
        """Answer what is in flight with `Unavailable`, in the event loop's next round."""
        self.abandoned = True
        for task in self._handlers:
            task.cancel()

    def shutting_down(self) -> Unavailable:
        return Unavailable("the server is shutting down", retry_after=LOADING_RETRY_AFTER)

    async def run(
        self, model: LoadedModel, request: ScoreRequest, salt: str | None, call: RequestContext
    ) -> ScoreResult:
        """Hand a request to the engine, for its caller and under the caller's salt, and wait."""
        submitted = monotonic()
        longest = min(self._max_wait, call.deadline - submitted)
        salt = cache_salt(call.tenant, salt)
        request = replace(request, salt=salt, deadline=call.deadline)
        refusal = model.engine.backlog.wait_refusal(request.num_tokens, longest)
        if refusal is not None:
            raise refusal
        result = await self._bridge_to(model.engine).score(request, partial(_taken, call.record))
        call.record.engine_stages(submitted, result.timings)
        return result

    def model_name(self, wanted: str | None) -> str:
        name = DEFAULT_MODEL if wanted is None else wanted
        if name not in (DEFAULT_MODEL, *self.names):
            raise ModelNotFound(f"this server has one model: {self.names[0]}", param="model")
        return name

    def _bridge_to(self, engine: ScoringEngine) -> Bridge:
        if self._bridge is None or self._bridge.loop is not asyncio.get_running_loop():
            self._bridge = Bridge(engine, self._answers_per_round)
        return self._bridge

    async def in_turns(self, call: RequestContext, work: Callable[[Turns], ResultT]) -> ResultT:
        """`work` in a thread, in turns with that of others; given up when nobody waits for it."""
        self._loop = asyncio.get_running_loop()
        job, future = self._text.submit(call.tenant, work)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._text.give_up(job)
            del future  # which knows the error, whose traceback knows this frame

    async def in_thread(self, call: RequestContext, work: Callable[[], ResultT]) -> ResultT:
        """The same for work that is over soon."""
        return await self.in_turns(call, lambda turns: work())

    def _text_ended(self, characters: int, given_up: bool) -> None:
        """In a thread of texts. What was given up ends later than its request, and has perhaps made
        far more ids than it has read characters: those of a query go into every prompt."""
        size = LARGE if given_up else characters
        if self._loop is not None and size >= LARGE:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self.memory.used, size)

    def _in_background(self, work: Callable[[], None]) -> None:
        """Work of the server's own, which takes its turns like a caller's."""
        if not self._text.closed:
            self._text.submit("", lambda turns: work())

    def close(self) -> None:
        self._text.close()
        if self.model is not None:
            self.model.engine.close()

    def loaded(self) -> LoadedModel:
        if self.model is None:
            raise Unavailable("the model is loading", retry_after=LOADING_RETRY_AFTER)
        if not self.model.engine.alive:  # before any work on its text
            raise Unavailable("the engine is not running", retry_after=LOADING_RETRY_AFTER)
        return self.model


def cache_salt(tenant: str, given: str | None) -> str:
    """What has to be equal for two requests to share a cached prefix.

    Always the key's owner: a hit shows in `cached_tokens` and in time, so a shared cache would tell
    one key's holder what another's has asked. The caller's salt only narrows that further. Hashed,
    so that neither a caller's text nor a key's digest goes any further.
    """
    return hashlib.sha256(f"{tenant}:{given or ''}".encode()).hexdigest()


def _taken(record: RequestRecord) -> None:
    record.progress = ENGINE
