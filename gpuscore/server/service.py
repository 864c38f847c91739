"""The models that a server serves: its state from loading to draining, its threads, its engines.

Requests that begin in the same round of the event loop go to the engine together. Answers that
arrive together wake the loop once.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from gpuscore.dialects.dialect import LARGE
from gpuscore.dialects.served import (
    LOADING_RETRY_AFTER,
    LOST,
    LoadedModel,
    ModelTable,
    ScoringEngine,
    ServedModel,
)
from gpuscore.errors import DeadlineExceeded, Unavailable
from gpuscore.server.text_work import TextScheduler, permits_here
from gpuscore.system.heap import collect_and_trim
from gpuscore.types.record import ENGINE, RequestRecord
from gpuscore.types.request import ScoreRequest, ScoreResult


class Pacer:
    """A queue of callbacks that runs some in each round of the event loop, in order of arrival.

    Args:
        pieces: returns the cost that the current round may have.
    """

    def __init__(self, pieces: Callable[[], int]) -> None:
        self._pieces = pieces
        self._left = pieces()
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._due = False  # `_run` will be called in the next round

    def __len__(self) -> int:
        """Return how many callbacks wait."""
        return len(self._waiting)

    def call(self, callback: Callable[[], None], cost: int = 1) -> None:
        """Call `callback` now if this round has time for it, else in a later round."""
        if self._waiting or self._left <= 0:
            self.add(callback, cost)
            return
        self._left -= cost
        self._plan()
        callback()

    def add(self, callback: Callable[[], None], cost: int = 1) -> None:
        """Call `callback` in a later round."""
        self._waiting.append((callback, cost))
        self._plan()

    def _plan(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._due = False
        self._left = self._pieces()
        try:
            for _ in range(len(self._waiting)):
                if self._left <= 0:
                    break
                callback, cost = self._waiting.popleft()
                self._left -= cost
                self._plan()  # the next round begins with new pieces
                callback()
        finally:
            if self._waiting:
                self._plan()


@dataclass(slots=True, eq=False)
class _Submission:
    request: ScoreRequest
    answer: "asyncio.Future[ScoreResult]"
    future: "Future[ScoreResult] | None" = None  # once the engine has it


class Bridge:
    """The bridge from one event loop, where all methods but `_on_done` run, to engines' threads.

    Args:
        engine: gets the requests.
        pacer: delivers the answers.
    """

    def __init__(self, engine: ScoringEngine, pacer: Pacer) -> None:
        self._engine = engine
        self._pacer = pacer
        self.loop = asyncio.get_running_loop()
        self._outgoing: list[_Submission] = []
        self._answered: deque[_Submission] = deque()
        self._waking = False

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Return the engine's result, or raise its error. If cancelled, drop the request."""
        call = _Submission(request, self.loop.create_future())
        if not self._outgoing:
            self.loop.call_soon(self._send)
        self._outgoing.append(call)
        try:
            return await call.answer
        finally:
            if call.future is not None and not call.future.done():
                call.future.cancel()
            call.future = None  # refers to the call, and this cycle would keep the result

    def _send(self) -> None:
        calls = [call for call in self._outgoing if not call.answer.done()]
        self._outgoing = []
        try:
            futures = self._engine.score_all([call.request for call in calls])
        except Exception as error:  # noqa: BLE001  (a bug; it must reach every waiting caller)
            for call in calls:
                call.answer.set_exception(error)
            return
        for call, future in zip(calls, futures, strict=True):
            call.future = future
            future.add_done_callback(partial(self._on_done, call))

    def _on_done(self, call: _Submission, _: "Future[ScoreResult]") -> None:
        """Let the loop deliver the answer; called in the engine's thread."""
        self._answered.append(call)
        if not self._waking and not self.loop.is_closed():
            self._waking = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._waking = False  # cleared first, so that an answer that comes now wakes the loop again
        while self._answered:
            self._pacer.call(partial(_resolve, self._answered.popleft()))


def _resolve(call: _Submission) -> None:
    future = call.future
    if future is not None and not future.cancelled():
        error = future.exception()
        _settle(call.answer, None if error else future.result(), error)


ResultT = TypeVar("ResultT")

PAUSE = 0.5  # seconds from a large request to the trim, and so the least time between two trims
ANSWERS = 16  # answers of the engine that a round of the event loop delivers


class ScoringService:
    """The service of a server's models, from before they are loaded until after it is drained.

    Args:
        models: the models to serve, at least one.
        max_queue_seconds: a request that would probably wait longer for the engine is refused.
        answers: paces the engine's answers.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        max_queue_seconds: float = math.inf,
        answers: Pacer | None = None,
    ) -> None:
        self.models = ModelTable(models)
        self.draining = False  # new requests are refused; those in flight are still answered
        self.abandoned = False
        self.failed = False  # the server is about to end, and unhealthy until then
        self._max_wait = max_queue_seconds
        self._answers = answers or Pacer(lambda: ANSWERS)
        self._handlers: set[asyncio.Task[Any]] = set()
        self._bridges: dict[ScoringEngine, Bridge] = {}
        # Text and large requests are worked on here, never on the event loop.
        self._text = TextScheduler(permits_here())
        self._trim_timer: asyncio.TimerHandle | None = None

    @property
    def healthy(self) -> bool:
        """True while a model loads or can score."""
        return not self.failed and any(served.state != LOST for served in self.models)

    @property
    def ready(self) -> bool:
        """True once all models are loaded, while one of them can score."""
        loaded = all(served.loaded is not None for served in self.models)
        return loaded and self.healthy and not self.draining

    @property
    def busy(self) -> bool:
        """True while a request is being worked on."""
        return bool(self._handlers)

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count the current task as in flight: a drain waits for it, and `abandon` ends it."""
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
        """Answer all requests in flight with `Unavailable`, in the event loop's next round."""
        self.abandoned = True
        for task in self._handlers:
            task.cancel()

    def shutting_down(self) -> Unavailable:
        return Unavailable("the server is shutting down", retry_after=LOADING_RETRY_AFTER)

    async def run(
        self, model: LoadedModel, request: ScoreRequest, record: RequestRecord
    ) -> ScoreResult:
        """Pass a request to the engine and return the result.

        Raises:
            GpuscoreError: the request's time is over, the expected wait is too long, or the engine
                refuses or fails.
        """
        submitted = monotonic()
        longest = self._max_wait
        if request.deadline is not None:
            longest = min(longest, request.deadline - submitted)
            if longest <= 0:
                raise DeadlineExceeded("the timeout of the request was over before its work began")
        backlog = model.backlog
        backlog.admit(request, longest)
        try:
            record.progress = ENGINE
            result = await self._bridge_to(model.engine).score(request)
        finally:
            backlog.leave(request)
        record.add_engine_stages(submitted, result.timings)
        return result

    def _bridge_to(self, engine: ScoringEngine) -> Bridge:
        bridge = self._bridges.get(engine)
        if bridge is None or bridge.loop is not asyncio.get_running_loop():
            bridge = self._bridges[engine] = Bridge(engine, self._answers)
        return bridge

    async def in_thread(
        self, tenant: str | None, function: Callable[[], ResultT], large: bool = False
    ) -> ResultT:
        """Run a function in a thread, in turns with other jobs; give it up if this is cancelled."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[ResultT] = loop.create_future()
        job = self._text.submit(tenant or "", function, partial(_deliver, loop, answer), large)
        try:
            return await answer
        finally:
            self._text.give_up(job)
            del answer  # it holds the error, whose traceback holds this frame

    def trim_after(self, size: int) -> None:
        """Give memory back to the system soon after a request of `size` bytes, if it was large.

        Otherwise hundreds of megabytes would stay with the process after a burst of large bodies.
        """
        if size >= LARGE and self._trim_timer is None:
            self._trim_timer = asyncio.get_running_loop().call_later(PAUSE, self._trim)

    def _trim(self) -> None:
        self._trim_timer = None
        asyncio.get_running_loop().run_in_executor(None, collect_and_trim)

    def close(self) -> None:
        self._text.close()
        for model in self.models:
            if model.loaded is not None:
                model.loaded.engine.close()


def _deliver(loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[Any]", *outcome: Any) -> None:
    """Let the loop set a job's outcome (result, error); called in the job's thread."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_settle, answer, *outcome)


def _settle(answer: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if answer.done():  # given up
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
