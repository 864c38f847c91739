"""The server's side of an `Engine` that runs in a process of its own."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count

from gpuscore.engine.admission import MAX_RETRY_AFTER, Backlog
from gpuscore.engine.ticket import resolve
from gpuscore.errors import GpuscoreError, TooManyTokens, Unavailable
from gpuscore.processes.worker.frames import MAX_FRAME, Send
from gpuscore.processes.worker.link import Report, Supervisor
from gpuscore.processes.worker.process import Patience
from gpuscore.processes.worker.wire import (
    Cancel,
    Failure,
    ProtocolError,
    Result,
    Score,
    Start,
    check_result,
    encode,
)
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import EngineStats

AT_ONCE = 1000  # items of a request that its caller's thread encodes, in some 0.2 ms


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: ScoreRequest
    future: "Future[ScoreResult]"

    @property
    def is_small(self) -> bool:
        return len(self.request.item_ids) <= AT_ONCE


class EngineClient:
    """Thread-safe client of an engine process, which is restarted when it is lost.

    Args:
        command: starts the child (`gpuscore.processes.worker.process.command`).
        start: the model to load, and the engine's limits.
        patience: times and counts after which the supervisor gives up waiting or restarting.
        environment: variables that the child gets besides this process's.
        own: the engines of its model; some may be made after it. While another engine is alive,
            requests of a silent child fail before it is killed, so that they run there.
        everyone: the engines of all models. While another engine may still start, a child that
            failed too often is started again all the same.
        after: the first child starts once this is done without an error.
        like: the `dtype` of another replica, which this replica waits for and takes over.

    Attributes:
        dtype: the number format that the first child has chosen.
    """

    def __init__(
        self,
        command: Sequence[str],
        start: Start,
        patience: Patience | None = None,
        environment: Mapping[str, str] | None = None,
        own: "Sequence[EngineClient]" = (),
        everyone: "Sequence[EngineClient]" = (),
        after: "Future[BackendLimits] | None" = None,
        like: "Future[str] | None" = None,
    ) -> None:
        self._own, self._everyone = own, everyone
        self._lock = threading.Lock()
        self._ids = count()
        self._issued = 0
        self._waiting: dict[int, _Waiting] = {}
        self.backlog = Backlog(start.engine, lambda: self._supervisor.rate)
        self._send: Send | None = None  # None while no child is ready
        self._closing = False
        options = patience or Patience(), environment or {}, self.may_give_up
        self._supervisor = Supervisor(command, start, self, *options, after, like)
        self.planned = self._supervisor.planned
        self.started = self._supervisor.started
        self.ended = self._supervisor.ended
        self.dtype = self._supervisor.dtype
        self._supervisor.start()

    @property
    def loaded(self) -> tuple[int, int]:
        """Bytes of weights that the child has read, and of all; 0 where that is not known."""
        return self._supervisor.loaded

    @property
    def alive(self) -> bool:
        """True while a child is ready and sends heartbeats."""
        return self._supervisor.healthy and not self._closing

    @property
    def hopeful(self) -> bool:
        """True while a child is ready or has not failed too often in a row."""
        return self.alive or self._supervisor.hopeful

    def may_give_up(self) -> bool:
        """Return True unless another engine is hopeful."""
        return not any(engine.hopeful for engine in self._everyone if engine is not self)

    @property
    def rate(self) -> float:
        """Tokens per second in well filled batches; 0 while unknown."""
        return self._supervisor.rate

    @property
    def reported(self) -> Report:
        """The child's last account of its work."""
        return self._supervisor.reported

    @property
    def pid(self) -> int | None:
        """The process id of the present child, or else of the last child."""
        return self._supervisor.pid

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    @property
    def retry_after(self) -> int:
        """Whole seconds until a child may be ready."""
        return MAX_RETRY_AFTER if self._closing else self._supervisor.retry_after

    def stats(self) -> EngineStats:
        """Return the child's last stats; only the counters and restarts while no child runs."""
        return self._supervisor.stats

    def score(self, request: ScoreRequest) -> "Future[ScoreResult]":
        """Queue a request without blocking. Cancelling the future drops work not launched yet.

        Raises:
            Overloaded, Unavailable: raised here; the future has all other errors.
        """
        (outcome,) = self.score_all([request])
        if isinstance(outcome, GpuscoreError):
            raise outcome
        return outcome

    def score_all(
        self, requests: Sequence[ScoreRequest]
    ) -> "list[Future[ScoreResult] | GpuscoreError]":
        """Queue requests as `score` does and send them over the pipe together.

        Returns:
            For each request, its future, or the error that `score` would have raised.
        """
        outcomes: list[Future[ScoreResult] | GpuscoreError] = []
        ids: list[int] = []
        with self._lock:
            send = self._send if self.alive else None
            for request in requests:
                try:
                    if send is None:
                        after = self.retry_after
                        raise Unavailable("the engine is not running", retry_after=after)
                    self.backlog.admit(request)  # here too, so that the pipe's queue is bounded
                except GpuscoreError as error:
                    outcomes.append(error)
                    continue
                future: Future[ScoreResult] = Future()
                ids.append(id := next(self._ids))
                self._waiting[id] = _Waiting(request, future)
                outcomes.append(future)
            self._issued = ids[-1] + 1 if ids else self._issued
            alone = len(self._waiting) == 1 and next(iter(self._waiting.values())).is_small
        if send is not None:
            send(*(partial(self._encode, id) for id in ids), now=alone)
            admitted = (outcome for outcome in outcomes if isinstance(outcome, Future))
            for id, future in zip(ids, admitted, strict=True):
                future.add_done_callback(partial(self._leave, id, send))
        return outcomes

    def close(self) -> None:
        """Fail unanswered requests with `Unavailable` and end the child after its present step."""
        self._closing = True
        self._fail_all()
        self._supervisor.close()

    def on_ready(self, send: Send) -> None:
        with self._lock:
            self._send = send

    def on_silent(self) -> None:
        if not any(engine.alive for engine in self._own if engine is not self):
            return
        with self._lock:
            silent, send = list(self._waiting), self._send
        self._fail_all()
        if send is not None and silent:  # if it is heard again, it need not finish them
            send(*(partial(encode, Cancel(id)) for id in silent))

    def on_lost(self) -> None:
        with self._lock:
            self._send = None
        self._fail_all()

    def on_answer(self, answer: Result | Failure) -> None:
        with self._lock:
            waiting = self._waiting.get(answer.id)
        if waiting is None:
            if answer.id >= self._issued:
                raise ProtocolError("an answer to a request that was never sent")
            return  # it was cancelled meanwhile
        if isinstance(answer, Failure):
            resolve(waiting.future, answer.error())
        else:
            resolve(waiting.future, check_result(answer.result, waiting.request))

    def _leave(self, id: int, send: Send, _: "Future[ScoreResult]") -> None:
        with self._lock:
            waiting = self._waiting.pop(id)
            self.backlog.leave(waiting.request)
        if waiting.future.cancelled():
            send(lambda: encode(Cancel(id)))

    def _encode(self, id: int) -> bytes | None:
        """Encode a request, in the writer's thread; None if it was cancelled meanwhile."""
        with self._lock:
            waiting = self._waiting.get(id)
        if waiting is None:
            return None
        frame = encode(Score(id, waiting.request))
        if len(frame) > MAX_FRAME:
            size = f"{len(frame)} bytes, the limit is {MAX_FRAME}"
            resolve(waiting.future, TooManyTokens(f"the request takes {size}", param="items"))
            return None
        return frame

    def _fail_all(self) -> None:
        with self._lock:
            lost = list(self._waiting.values())
        for waiting in lost:
            error = Unavailable("the engine stopped", retry_after=self.retry_after)
            resolve(waiting.future, error)
