"""The bridge between the event loop and the engine's threads.

Requests that begin in the same round of the loop go to the engine together. Answers that arrive
together wake the loop once.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gpuscore.errors import GpuscoreError
from gpuscore.types.request import ScoreRequest, ScoreResult


class EngineIntake(Protocol):
    def score_all(
        self, requests: list[ScoreRequest]
    ) -> "list[Future[ScoreResult] | GpuscoreError]": ...


@dataclass(slots=True, eq=False)
class _Submission:
    request: ScoreRequest
    answer: "asyncio.Future[ScoreResult]"
    taken: Callable[[], None]
    future: "Future[ScoreResult] | None" = None  # once the engine has it


class Bridge:
    """The bridge of one event loop, on which all methods except `_done` run.

    Args:
        engine: gets the requests.
        pieces: returns the number of answers that this round may deliver; the others wait for the
            next round.
    """

    def __init__(self, engine: EngineIntake, pieces: Callable[[], int]) -> None:
        self._engine, self._pieces = engine, pieces
        self.loop = asyncio.get_running_loop()
        self._going: list[_Submission] = []
        self._coming: deque[_Submission] = deque()
        self._waking = False

    async def score(self, request: ScoreRequest, taken: Callable[[], None]) -> ScoreResult:
        """Return the engine's result; raise the errors of `Engine.score`.

        `taken` is called when the engine has admitted the request. If the caller is cancelled, the
        engine drops the request.
        """
        call = _Submission(request, self.loop.create_future(), taken)
        if not self._going:
            self.loop.call_soon(self._send)
        self._going.append(call)
        try:
            return await call.answer
        finally:
            if call.future is not None and not call.future.done():
                call.future.cancel()

    def _send(self) -> None:
        calls = [call for call in self._going if not call.answer.done()]
        self._going = []
        try:
            outcomes = self._engine.score_all([call.request for call in calls])
        except Exception as error:  # noqa: BLE001  (a bug; it must reach every waiting caller)
            for call in calls:
                call.answer.set_exception(error)
            return
        for call, outcome in zip(calls, outcomes, strict=True):
            if isinstance(outcome, GpuscoreError):
                call.answer.set_exception(outcome)
            else:
                call.future = outcome
                call.taken()
                outcome.add_done_callback(partial(self._done, call))

    def _done(self, call: _Submission, _: "Future[ScoreResult]") -> None:
        """Have the answer delivered on the loop; called in the engine's thread that made it."""
        self._coming.append(call)
        if not self._waking and not self.loop.is_closed():
            self._waking = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._waking = False  # cleared first, so that an answer that comes now wakes the loop again
        for _ in range(min(self._pieces(), len(self._coming))):
            call = self._coming.popleft()
            future, answer = call.future, call.answer
            if future is None or future.cancelled() or answer.done():
                continue
            error = future.exception()
            if error is None:
                answer.set_result(future.result())
            else:
                answer.set_exception(error)
        if self._coming and not self._waking:
            self._waking = True
            self.loop.call_soon(self._deliver)
