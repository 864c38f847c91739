"""The engine: `score_all` queues requests, and the engine's thread steps a `Runner`.

The thread repeats: move new requests to the runner, let the runner do a step, which may answer
requests. `scheduler.py` decides what a step computes.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic

from gpuscore.backends.base import Backend
from gpuscore.engine.plan import plan_items
from gpuscore.engine.runner import Runner
from gpuscore.engine.start_checks import check_collapse, check_same_bits
from gpuscore.engine.ticket import Progress, Ticket, resolve
from gpuscore.errors import Unavailable
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import EngineStats

logger = logging.getLogger(__name__)

WELL_FILLED = 4  # a batch of at least 1/WELL_FILLED of max_tokens counts for the capacity
RATE_SECONDS = 5.0  # after so much further work, a step's weight in the average is 1/e
RETRY_AFTER = 30  # seconds


class Rate:
    """A smoothed rate in tokens per second; one thread adds, any thread may read `value`."""

    def __init__(self) -> None:
        self.value = 0.0  # unknown
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Add `tokens` that were computed in `seconds`."""
        decay = math.exp(-seconds / RATE_SECONDS)
        self._tokens = decay * self._tokens + tokens
        self._seconds = decay * self._seconds + seconds
        self.value = self._tokens / self._seconds if self._seconds > 0 else 0.0


class Engine:
    """A thread-safe queue before a `Runner`; `close` fails the requests that are not answered yet.

    Args:
        backend: computes the batches.
        prefix_cache: keep the keys and values of queries for later requests.
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
        *,
        prefix_cache: bool = True,
        clock: Callable[[], float] = monotonic,
        after_step: Callable[[], None] = lambda: None,
        allow_degenerate: bool = False,
    ) -> None:
        self.clock = clock
        self._after_step = after_step
        self._backend = backend
        if backend.limits.deterministic_chunk:
            check_same_bits(backend)
        if backend.limits.quantized:
            check_collapse(backend, allow_degenerate)
        self._runner = Runner(backend, clock, prefix_cache=prefix_cache)
        self._inbox: deque[Ticket] = deque()
        self._condition = threading.Condition()
        self._rate = Rate()  # of all steps
        self._capacity = Rate()  # of well filled ones only
        self._requests = 0  # not answered yet
        self._tokens = 0  # of those requests
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

    @property
    def rate(self) -> float:
        """Tokens per second in well filled batches; 0 while unknown."""
        return self._capacity.value

    def stats(self) -> EngineStats:
        """Return the engine's present load and its counters; any thread may call this."""
        pages = self._runner.scheduler.pages
        states = self._runner.scheduler.states
        with self._condition:
            return EngineStats(
                requests=self._requests,
                tokens=self._tokens,
                pages_free=pages.num_free,
                pages_cached=pages.num_cached,
                pages_used=pages.num_used,
                tokens_per_second=self._rate.value,
                capacity=self.rate,
                counters=self._runner.counters(),
                tokens_left=self._runner.tokens_left(),
                running=self._runner.num_launched(),
                states_free=states.num_free,
                states_cached=states.num_cached,
                states_used=states.num_used,
            )

    def score(
        self, request: ScoreRequest, progress: Progress | None = None
    ) -> "Future[ScoreResult]":
        """Queue a request, as `score_all` does."""
        return self.score_all([request], progress)[0]

    def score_all(
        self, requests: Sequence[ScoreRequest], progress: Progress | None = None
    ) -> "list[Future[ScoreResult]]":
        """Queue all these requests together, so that one batch may compute them all.

        Cancelling a future drops its work that has not been launched yet. A future raises
        InsufficientMemory if the request does not fit the KV cache, even alone, and Unavailable if
        the engine is closed or has failed.

        Args:
            requests: token ids within the backend's limits.
            progress: called from the engine's thread with the number of rows scored so far.
        """
        arrived = self.clock()
        plans = [plan_items(request, self.limits) for request in requests]
        tickets = [Ticket(plan, Future(), progress, arrived) for plan in plans]
        with self._condition:
            if alive := self.alive:
                self._inbox += tickets
                self._requests += len(requests)
                self._tokens += sum(request.num_tokens for request in requests)
                self._condition.notify()
        for ticket in tickets:
            if alive:
                ticket.future.add_done_callback(partial(self._answered, ticket.request.num_tokens))
            else:
                resolve(ticket.future, _unavailable("the engine is not running"))
        return [ticket.future for ticket in tickets]

    def close(self) -> None:
        """Stop after the present step; requests not answered by then fail with `Unavailable`."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()
        self._backend.close()

    def _answered(self, tokens: int, _: "Future[ScoreResult]") -> None:
        with self._condition:
            self._requests -= 1
            self._tokens -= tokens
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
            self._runner.fail_all(_unavailable("the engine stopped"))
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
        """Do a step, and measure its rate."""
        start = self.clock()
        computed_before = self._runner.computed_tokens
        self._runner.step()
        # A batch is launched in one step and collected in the next, so one step alone gives no
        # rate; `Rate` divides sums over several steps.
        elapsed = max(0.0, self.clock() - start)
        computed = self._runner.computed_tokens - computed_before
        self._rate.add(computed, elapsed)
        if computed * WELL_FILLED >= self.limits.max_tokens:
            self._capacity.add(computed, elapsed)


def _unavailable(why: str) -> Unavailable:
    return Unavailable(why, retry_after=RETRY_AFTER)
