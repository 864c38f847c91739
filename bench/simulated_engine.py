"""An engine in simulated time, with the core of the real one, for bench/replicas.py."""

import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count

import numpy as np

from gpuscore.config import EngineConfig
from gpuscore.engine.admission import Backlog
from gpuscore.engine.runner import Runner
from gpuscore.engine.ticket import Ticket
from gpuscore.errors import GpuscoreError
from gpuscore.processes.worker.child import BEAT
from gpuscore.processes.worker.link import Report
from gpuscore.types.batch import PackedBatch, RowScores
from gpuscore.types.limits import BackendLimits
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import NO_STATS, EngineStats

# Roughly a model of 0.6 billion parameters on a large GPU.
BATCH_SECONDS, TOKEN_SECONDS = 2e-3, 2e-6
LIMITS = BackendLimits(
    max_tokens=16_384, page_size=16, num_pages=60_000, max_model_len=32_768, vocab_rows=32_000
)


class Clock:
    """Simulated time and the events to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def run(self) -> None:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()


class Device:
    """A backend that only takes time."""

    limits = LIMITS

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.ready = self.busy = 0.0

    def extend(self, batch: PackedBatch) -> RowScores:
        seconds = BATCH_SECONDS + TOKEN_SECONDS * batch.num_tokens
        self.busy += seconds
        self.ready = self._clock.now + seconds
        lse = np.zeros(len(batch.score_rows), np.float32)
        return RowScores(np.zeros(int(batch.cu_labels[-1]), np.float32), lse, None, None)

    def collect(self, pending: RowScores) -> RowScores:
        return pending


class Engine:
    """A replica in simulated time."""

    alive, retry_after = True, 1

    def __init__(self, clock: Clock) -> None:
        self._clock, self.device = clock, Device(clock)
        self._runner = Runner(self.device, lambda: clock.now, prefix_cache=True)  # type: ignore[arg-type]
        self.backlog = Backlog(EngineConfig(), lambda: self.rate)
        self.rate = 1 / TOKEN_SECONDS
        self.planned: Future[str] = Future()
        self.started: Future[BackendLimits] = Future()
        self.ended: Future[None] = Future()
        self.started.set_result(LIMITS)
        self._stepping = False
        self._reports, self._left, self._next_report = 0, 0, BEAT

    @property
    def reported(self) -> Report:
        """The last heartbeat; an idle engine has nothing to report."""
        if self._clock.now >= self._next_report:
            self._next_report = self._clock.now // BEAT * BEAT + BEAT
            self._reports, self._left = self._reports + 1, self._runner.tokens_left()
        return Report(self._reports, self._left, alone=True)

    def score_all(
        self, requests: Sequence[ScoreRequest]
    ) -> "list[Future[ScoreResult] | GpuscoreError]":
        tickets = [Ticket(request, Future(), None, self._clock.now) for request in requests]
        for ticket in tickets:
            self._runner.add(ticket)
        if not self._stepping:
            self._stepping = True
            self._clock.at(self._clock.now, self._step)
        return [ticket.future for ticket in tickets]

    def stats(self) -> EngineStats:
        return NO_STATS

    def close(self) -> None:
        pass

    def _step(self) -> None:
        """Collect the batch that is ready now, and launch the next one."""
        self._runner.step()
        self._stepping = not self._runner.idle
        if self._stepping:
            self._clock.at(max(self._clock.now, self.device.ready), self._step)
