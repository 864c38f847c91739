"""The engine: `score` admits and queues requests; one thread drives the runner."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic

from gpuscore.backends.base import Backend
from gpuscore.config import EngineConfig
from gpuscore.engine.admission import MAX_RETRY_AFTER, Backlog, Rate
from gpuscore.engine.plan import Plan, plan_items
from gpuscore.engine.runner import Runner
from gpuscore.engine.start_checks import check_collapse, check_same_bits
from gpuscore.engine.ticket import Progress, Ticket
from gpuscore.errors import GpuscoreError, InsufficientMemory, Unavailable
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import EngineStats

logger = logging.getLogger(__name__)

WELL_FILLED = 4  # a batch of at least 1/WELL_FILLED of max_tokens counts for the capacity


class Engine:
    """Thread-safe front of a `Runner`; `close` fails the requests that are not answered yet.

    Args:
        backend: computes the batches.
        config: the limits on the requests in flight.
        clock: monotonic seconds.
        after_step: called from the engine's thread after each step that may answer requests.
        allow_degenerate: serve a quantised model although it has collapsed.

    Raises:
        ConfigError: the backend claims to be deterministic and is not, or its quantised model has
            collapsed.
    """

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        clock: Callable[[], float] = monotonic,
        after_step: Callable[[], None] = lambda: None,
        allow_degenerate: bool = False,
    ) -> None:
        self.config = config
        self.clock = clock
        self._after_step = after_step
        self._backend = backend
        if backend.limits.deterministic_chunk:
            check_same_bits(backend)
        if backend.limits.quantized:
            check_collapse(backend, allow_degenerate)
        self._runner = Runner(backend, clock, prefix_cache=config.prefix_cache)
        self._inbox: deque[Ticket] = deque()
        self._condition = threading.Condition()
        self._rate, self._capacity = Rate(), Rate()  # of all steps; of well filled ones only
        self.backlog = Backlog(config, lambda: self._capacity.value)
        self._closing = False
        self._failed = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    @property
    def limits(self) -> BackendLimits:
        return self._backend.limits

    @property
    def alive(self) -> bool:
        """True until the loop fails or the engine is closed."""
        return self._thread.is_alive() and not self._failed and not self._closing

    def stats(self) -> EngineStats:
        """Return the engine's present load and its counters; any thread may call this."""
        pages, states = self._runner.scheduler.pages, self._runner.scheduler.states
        with self._condition:
            return EngineStats(
                requests=self.backlog.requests,
                tokens=self.backlog.tokens,
                pages_free=pages.num_free,
                pages_cached=pages.num_cached,
                pages_used=pages.num_used,
                tokens_per_second=self._rate.value,
                capacity=self._capacity.value,
                counters=self._runner.counters(),
                tokens_left=self._runner.tokens_left(),
                running=self._runner.begun(),
                states_free=states.num_free,
                states_cached=states.num_cached,
                states_used=states.num_used,
            )

    def score(
        self, request: ScoreRequest, progress: Progress | None = None
    ) -> "Future[ScoreResult]":
        """Queue a request. Cancelling the future drops its work that has not been launched yet.

        Args:
            request: token ids within the backend's limits.
            progress: called from the engine's thread with the number of rows scored so far.

        Raises:
            Overloaded: the queue is full; carries `retry_after` in seconds.
            InsufficientMemory: the request does not fit the KV cache, even alone.
            Unavailable: the engine is closed or has failed.
        """
        (outcome,) = self.score_all([request], progress)
        if isinstance(outcome, GpuscoreError):
            raise outcome
        return outcome

    def score_all(
        self, requests: Sequence[ScoreRequest], progress: Progress | None = None
    ) -> "list[Future[ScoreResult] | GpuscoreError]":
        """Queue all these requests together, so that one batch may compute them all.

        Returns:
            For each request, its future, or the error that `score` would have raised.
        """
        outcomes: list[Future[ScoreResult] | GpuscoreError] = []
        arrived = self.clock()
        plans = [plan_items(request, self.limits) for request in requests]
        with self._condition:
            for plan in plans:
                try:
                    self._admit(plan)
                except GpuscoreError as error:
                    outcomes.append(error)
                    continue
                future: Future[ScoreResult] = Future()
                self._inbox.append(Ticket(plan, future, progress, arrived))
                outcomes.append(future)
            self._condition.notify()
        for request, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, Future):
                outcome.add_done_callback(partial(self._leave, request))
        return outcomes

    def _admit(self, plan: Plan) -> None:
        if not self._runner.scheduler.fits(plan):
            raise InsufficientMemory(
                f"the request's {len(plan.query_ids)} shared tokens and longest item need more "
                f"than the {self.limits.num_pages * self.limits.page_size} tokens of KV cache"
            )
        if not self.alive:
            raise Unavailable("the engine is not running", retry_after=MAX_RETRY_AFTER)
        self.backlog.admit(plan.request)

    def close(self) -> None:
        """Stop after the present step; requests not answered by then fail with `Unavailable`."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()
        self._backend.close()

    def _leave(self, request: ScoreRequest, _: "Future[ScoreResult]") -> None:
        with self._condition:
            self.backlog.leave(request)
            self._condition.notify()  # wakes the loop, which drops a cancelled request

    def _loop(self) -> None:
        try:
            while self._take_inbox():
                self._step()
                self._after_step()
        except Exception:
            self._failed = True
            logger.exception("the engine loop failed")
        finally:
            with self._condition:
                self._failed = self._failed or not self._closing
                waiting = list(self._inbox)
                self._inbox.clear()
            for ticket in waiting:
                self._runner.add(ticket)
            self._runner.fail_all(Unavailable("the engine stopped", retry_after=MAX_RETRY_AFTER))
            self._after_step()

    def _take_inbox(self) -> bool:
        """Move new requests to the runner; wait while there is no work. False once closing."""
        with self._condition:
            while not self._inbox and self._runner.idle and not self._closing:
                self._condition.wait()
            while self._inbox:
                self._runner.add(self._inbox.popleft())
            return not self._closing

    def _step(self) -> None:
        start, done = self.clock(), self._runner.tally.computed_tokens
        self._runner.step()
        # A batch is launched in one step and collected in the next, so one step alone gives no
        # rate; `Rate` divides sums over several steps.
        elapsed = max(0.0, self.clock() - start)
        done = self._runner.tally.computed_tokens - done
        self._rate.add(done, elapsed)
        if done * WELL_FILLED >= self.limits.max_tokens:
            self._capacity.add(done, elapsed)
