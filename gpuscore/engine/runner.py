"""The step: plan a batch, launch it, collect the batch before it, resolve finished requests."""

import logging
from collections.abc import Callable, Sequence
from time import monotonic

from gpuscore.backends.base import Backend, DeviceLost, OutOfMemory, Pending
from gpuscore.engine.jobs import Job, Share, draft_batch, is_minimal
from gpuscore.engine.plan import QUERY
from gpuscore.engine.scheduler import Scheduler
from gpuscore.engine.ticket import Ticket, resolve
from gpuscore.errors import (
    DeadlineExceeded,
    GpuscoreError,
    InsufficientMemory,
    InternalError,
    NonfiniteScore,
    causes,
)
from gpuscore.types.batch import PackedBatch, RowScores
from gpuscore.types.stats import EngineCounters

Launched = tuple[Sequence[Share], PackedBatch, Pending]

logger = logging.getLogger(__name__)

# Successive out-of-memory batches before a request fails. Each halves the next batch: 16 halvings
# take a million tokens down to 16. Without this bound, several pieces that are so short that every
# batch holds more than one of them would be tried for ever.
MAX_OUT_OF_MEMORY = 16


class Runner:
    """The owner of the scheduler and of the batch in flight; single-threaded.

    `step` plans and launches a batch while the one before it runs.
    """

    def __init__(
        self,
        backend: Backend,
        clock: Callable[[], float] = monotonic,
        *,
        prefix_cache: bool = True,
    ) -> None:
        self.backend = backend
        self.clock = clock
        self.scheduler = Scheduler(backend.limits, prefix_cache=prefix_cache)
        # Any thread may read these; one may be as before a batch, and another as after it.
        self.oom_retried = self.oom_failed = self.nonfinite_rows = 0
        self.computed_tokens = self.batches = self.items = 0
        self._out_of_memory = 0  # successive batches
        self._tickets: dict[Job, Ticket] = {}
        self._running: Launched | None = None

    @property
    def idle(self) -> bool:
        return not self._tickets and self._running is None

    def add(self, ticket: Ticket) -> None:
        """Add a request, or refuse it if it can never fit."""
        if self.scheduler.fits(ticket.plan):
            self._tickets[self.scheduler.add(ticket.plan)] = ticket
            return
        limits = self.backend.limits
        refusal = InsufficientMemory(
            f"the request's {len(ticket.plan.query_ids)} shared tokens and longest item need more "
            f"than the {limits.num_pages * limits.page_size} tokens of KV cache"
        )
        resolve(ticket.future, refusal)

    def step(self) -> None:
        """Launch the next batch and collect the one before."""
        self._drop_given_up()
        planned = self.clock()
        shares = self.scheduler.next_batch()
        launched = self._launch(shares, planned) if shares else None
        if self._running is not None:
            self._finish(*self._running)
        self._running = launched

    def counters(self) -> EngineCounters:
        """Return the counters since start; any thread may call this."""
        return EngineCounters(
            batches=self.batches,
            computed_tokens=self.computed_tokens,
            cached_tokens=self.scheduler.cached_tokens,
            evicted_pages=self.scheduler.pages.evicted,
            oom_retried=self.oom_retried,
            oom_failed=self.oom_failed,
            nonfinite_rows=self.nonfinite_rows,
            batch_items=self.items,
            evicted_states=self.scheduler.states.evicted,
        )

    def tokens_left(self) -> int:
        """Return the tokens still to compute for all requests; any thread may call this."""
        return sum(
            max(0, job.plan.num_tokens - ticket.computed_tokens - job.cached)
            for job, ticket in list(self._tickets.items())
        )

    def begun(self) -> int:
        """Return the requests that have been in a batch; any thread may call this."""
        return sum(ticket.launched is not None for ticket in list(self._tickets.values()))

    def fail_all(self, error: GpuscoreError) -> None:
        """Answer all unanswered requests with `error` and abandon the batch in flight."""
        for job in list(self._tickets):
            self._fail(job, error)
        if self._running is not None:
            self.scheduler.failed(self._running[0])
            self._running = None

    def _launch(self, shares: Sequence[Share], planned: float) -> Launched | None:
        batch = draft_batch(shares, self.backend.limits)
        now = self.clock()
        for share in shares:
            ticket = self._tickets[share.job]
            if ticket.planned is None:
                ticket.planned, ticket.launched = planned, now
                ticket.take_kept(share.job.cached_rows)
        try:
            return shares, batch, self.backend.extend(batch)
        except DeviceLost:  # ends the loop and the process
            raise
        except Exception as error:  # noqa: BLE001  (fails this batch's requests, not the loop)
            if self._running is not None:  # batches are finished in the order of their launch
                self._finish(*self._running)
                self._running = None
            self._batch_failed(shares, error)
            return None

    def _finish(self, shares: Sequence[Share], batch: PackedBatch, pending: Pending) -> None:
        try:
            scores = self.backend.collect(pending)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001  (fails this batch's requests, not the loop)
            self._batch_failed(shares, error)
            return
        self.batches += 1
        self.computed_tokens += batch.num_tokens
        self.items += len(batch.score_rows)
        self._out_of_memory = 0
        valid = [share.valid for share in shares]
        self.scheduler.succeeded(shares)
        row = 0
        for share, counts in zip(shares, valid, strict=True):
            if counts and share.job in self._tickets:
                self._tickets[share.job].computed_tokens += share.tokens
                self._deliver(share, batch, row, scores)
            row += share.num_rows
        for share in shares:
            self._report(share.job)

    def _deliver(self, share: Share, batch: PackedBatch, first_row: int, scores: RowScores) -> None:
        """Give the rows of a share to its ticket; run items with non-finite rows once more."""
        job = share.job
        broken, rows = self._tickets[job].take(share, batch, first_row, scores)
        self.nonfinite_rows += rows
        for item in broken:
            if share.alone or item in job.retried:
                param = f"items[{job.plan.callers_item(item)}]"
                message = f"the model's output for {param} is not finite"
                self.scheduler.pages.forget(job.keys or ())  # their content may be the reason
                self._fail(job, NonfiniteScore(message, param=param))
                return
            of_long = share.long is not None and item == share.long[0]
            if item == QUERY or (job.plan.reads is not None and of_long):
                self.scheduler.retry_chunk(share)
            else:
                self.scheduler.retry_alone(job, item)
        if share.scores_query and QUERY not in broken:
            self.scheduler.publish(job, share.query[1], self._tickets[job].query_rows)

    def _report(self, job: Job) -> None:
        """Call the request's progress callback, and resolve the request if it has all its rows."""
        ticket = self._tickets.get(job)
        if ticket is None:
            return
        if ticket.progress is not None:
            try:
                ticket.progress(ticket.done)
            except Exception as error:  # noqa: BLE001  (the caller's code: fails only its request)
                failed = InternalError("the progress callback failed")
                failed.__cause__ = _outside(error)
                self._fail(job, failed)
                return
        if ticket.rows_left == 0:
            del self._tickets[job]
            self.scheduler.remove(job)
            resolve(ticket.future, ticket.result(self.clock()))

    def _drop_given_up(self) -> None:
        """Drop requests that were cancelled, and fail those whose deadline has passed."""
        now = self.clock()
        for job, ticket in list(self._tickets.items()):
            if ticket.future.cancelled():
                self._fail(job, None)
            elif ticket.request.deadline is not None and ticket.request.deadline <= now:
                self._fail(job, DeadlineExceeded("the request's deadline is over"))

    def _batch_failed(self, shares: Sequence[Share], error: Exception) -> None:
        tokens = sum(share.tokens for share in shares)
        if not isinstance(error, OutOfMemory):
            logger.error("a batch of %d tokens failed", tokens, exc_info=error)
            shown = _caused(InternalError("the backend failed"), error)
            for share in shares:
                self._fail(share.job, shown)
            self.scheduler.failed(shares)
            return
        logger.warning("out of memory on a batch of %d tokens", tokens)
        self._out_of_memory += 1
        minimal = is_minimal(shares, self.scheduler.min_budget)
        if minimal or self._out_of_memory > MAX_OUT_OF_MEMORY:
            self.oom_failed += 1
            shown = _caused(InsufficientMemory("not even one item fits the device's memory"), error)
            self._fail(shares[0].job, shown)
        else:
            self.oom_retried += 1
        self.scheduler.failed(shares)
        self.scheduler.shrink()

    def _fail(self, job: Job, error: GpuscoreError | None) -> None:
        """Remove a request and set its error; without an error (None) if it was cancelled."""
        ticket = self._tickets.pop(job, None)
        self.scheduler.remove(job)
        if ticket is not None and error is not None:
            resolve(ticket.future, error)


def _caused(error: GpuscoreError, cause: Exception) -> GpuscoreError:
    """Set the cause of an error that a caller may keep, without its frames.

    Frames refer to the batch, and to the device's memory that it took. The log has them.
    """
    for error_in_chain in causes(cause):
        error_in_chain.__traceback__ = None
    error.__cause__ = cause
    return error


def _outside(error: Exception) -> Exception:
    """Return an error of a caller's function with that function's frames only."""
    assert error.__traceback__ is not None  # noqa: S101  (it was raised)
    return error.with_traceback(error.__traceback__.tb_next)
