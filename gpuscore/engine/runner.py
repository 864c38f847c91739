"""The engine's step: schedule a batch, launch it, collect the batch before it, answer requests.

So the host prepares a batch while the device computes the one before it.
"""

import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

from gpuscore.backends.base import Backend, DeviceLost, OutOfMemory, Pending
from gpuscore.engine.jobs import Job, ScheduledChunk, build_batch, is_minimal
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


class Launched(NamedTuple):
    """A batch that the backend computes."""

    chunks: Sequence[ScheduledChunk]
    batch: PackedBatch
    pending: Pending


logger = logging.getLogger(__name__)

# Successive out-of-memory batches before a request fails. Each halves the next batch: 16 halvings
# take a million tokens down to 16. Without this bound, items that are too short to be alone in a
# batch would be tried for ever.
MAX_OUT_OF_MEMORY = 16


class Runner:
    """The owner of the scheduler and of the batch in flight; single-threaded."""

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
        # Counters, which any thread may read. One may include a batch that another does not yet.
        self.oom_retried = self.oom_failed = self.nonfinite_rows = 0
        self.computed_tokens = self.batches = self.items = 0
        self._out_of_memory = 0  # successive batches
        self._tickets: dict[Job, Ticket] = {}
        self._in_flight: Launched | None = None

    @property
    def idle(self) -> bool:
        return not self._tickets and self._in_flight is None

    def add(self, ticket: Ticket) -> None:
        """Add a request, or refuse it if it can never fit."""
        if self.scheduler.fits(ticket.plan):
            self._tickets[self.scheduler.add(ticket.plan)] = ticket
            return
        limits = self.backend.limits
        refusal = InsufficientMemory(
            f"the KV cache holds {limits.num_pages * limits.page_size} tokens; the request's "
            f"{len(ticket.plan.query_ids)} shared tokens and its longest item need more"
        )
        resolve(ticket.future, refusal)

    def step(self) -> None:
        """Launch the next batch and collect the one before."""
        self._drop_cancelled_and_late()
        scheduled_at = self.clock()
        chunks = self.scheduler.schedule()
        launched = self._launch(chunks, scheduled_at) if chunks else None
        if self._in_flight is not None:
            self._collect(self._in_flight)
        self._in_flight = launched

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
            max(0, job.plan.num_tokens - ticket.computed_tokens - job.cached_tokens)
            for job, ticket in list(self._tickets.items())
        )

    def num_launched(self) -> int:
        """Return the number of requests that have been in a batch; any thread may call this."""
        return sum(ticket.launched_at is not None for ticket in list(self._tickets.values()))

    def fail_all(self, error: GpuscoreError) -> None:
        """Answer all unanswered requests with `error` and abandon the batch in flight."""
        for job in list(self._tickets):
            self._fail(job, error)
        if self._in_flight is not None:
            self.scheduler.failed(self._in_flight.chunks)
            self._in_flight = None

    def _launch(self, chunks: Sequence[ScheduledChunk], scheduled_at: float) -> Launched | None:
        """Launch a batch. If that fails, fail or reschedule its requests and return None."""
        batch = build_batch(chunks, self.backend.limits)
        now = self.clock()
        for chunk in chunks:
            ticket = self._tickets[chunk.job]
            if ticket.scheduled_at is None:
                ticket.scheduled_at = scheduled_at
                ticket.launched_at = now
                ticket.fill_from_cache(chunk.job.cached_rows)
        try:
            return Launched(chunks, batch, self.backend.extend(batch))
        except DeviceLost:  # ends the loop and the process
            raise
        except Exception as error:  # noqa: BLE001  (fails this batch's requests, not the loop)
            if self._in_flight is not None:  # batches are collected in the order of their launch
                self._collect(self._in_flight)
                self._in_flight = None
            self._batch_failed(chunks, error)
            return None

    def _collect(self, launched: Launched) -> None:
        """Wait for a batch, give its rows to their tickets, and answer requests that are done."""
        chunks, batch, pending = launched
        try:
            scores = self.backend.collect(pending)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001  (fails this batch's requests, not the loop)
            self._batch_failed(chunks, error)
            return
        self.batches += 1
        self.computed_tokens += batch.num_tokens
        self.items += len(batch.score_rows)
        self._out_of_memory = 0
        valid = [chunk.valid for chunk in chunks]
        self.scheduler.succeeded(chunks)
        first_row = 0
        for chunk, is_valid in zip(chunks, valid, strict=True):
            if is_valid and chunk.job in self._tickets:
                self._tickets[chunk.job].computed_tokens += chunk.num_tokens
                self._deliver(chunk, batch, first_row, scores)
            first_row += chunk.num_rows
        for chunk in chunks:
            self._report(chunk.job)

    def _deliver(
        self, chunk: ScheduledChunk, batch: PackedBatch, first_row: int, scores: RowScores
    ) -> None:
        """Give the rows of a chunk to its ticket; compute items with non-finite rows once more."""
        job = chunk.job
        nonfinite_items, rows = self._tickets[job].take(chunk, batch, first_row, scores)
        self.nonfinite_rows += rows
        for item in nonfinite_items:
            if chunk.is_retry or item in job.retried:
                param = f"items[{job.plan.callers_item(item)}]"
                message = f"the model's output for {param} is not finite"
                self.scheduler.pages.forget(job.keys or ())  # their content may be the reason
                self._fail(job, NonfiniteScore(message, param=param))
                return
            is_long = chunk.long is not None and item == chunk.long.item
            if item == QUERY or (job.plan.reads is not None and is_long):
                self.scheduler.retry_chunk(chunk)
            else:
                self.scheduler.retry_item(job, item)
        if chunk.scores_query and QUERY not in nonfinite_items:
            self.scheduler.publish(job, chunk.query[1], self._tickets[job].query_rows)

    def _report(self, job: Job) -> None:
        """Call the request's progress callback, and resolve the request if it has all its rows."""
        ticket = self._tickets.get(job)
        if ticket is None:
            return
        if ticket.progress is not None:
            try:
                ticket.progress(ticket.rows_done)
            except Exception as error:  # noqa: BLE001  (the caller's code: fails only its request)
                failed = InternalError("the progress callback failed")
                failed.__cause__ = _without_caller_frame(error)
                self._fail(job, failed)
                return
        if ticket.rows_left == 0:
            del self._tickets[job]
            self.scheduler.remove(job)
            resolve(ticket.future, ticket.result(self.clock()))

    def _drop_cancelled_and_late(self) -> None:
        """Drop requests that were cancelled, and fail those whose deadline has passed."""
        now = self.clock()
        for job, ticket in list(self._tickets.items()):
            if ticket.future.cancelled():
                self._fail(job, None)
            elif ticket.request.deadline is not None and ticket.request.deadline <= now:
                self._fail(job, DeadlineExceeded("the request's deadline has passed"))

    def _batch_failed(self, chunks: Sequence[ScheduledChunk], error: Exception) -> None:
        """Fail the requests of a batch; after an out-of-memory error try smaller batches first."""
        tokens = sum(chunk.num_tokens for chunk in chunks)
        if not isinstance(error, OutOfMemory):
            logger.error("a batch of %d tokens failed", tokens, exc_info=error)
            failure = _caused(InternalError("the backend failed"), error)
            for chunk in chunks:
                self._fail(chunk.job, failure)
            self.scheduler.failed(chunks)
            return
        logger.warning("out of memory on a batch of %d tokens", tokens)
        self._out_of_memory += 1
        minimal = is_minimal(chunks, self.scheduler.min_token_budget)
        if minimal or self._out_of_memory > MAX_OUT_OF_MEMORY:
            self.oom_failed += 1
            refusal = InsufficientMemory("not even one item fits the device's memory")
            self._fail(chunks[0].job, _caused(refusal, error))
        else:
            self.oom_retried += 1
        self.scheduler.failed(chunks)
        self.scheduler.shrink()

    def _fail(self, job: Job, error: GpuscoreError | None) -> None:
        """Remove a request and set its error; None = it was cancelled."""
        ticket = self._tickets.pop(job, None)
        self.scheduler.remove(job)
        if ticket is not None and error is not None:
            resolve(ticket.future, error)


def _caused(error: GpuscoreError, cause: Exception) -> GpuscoreError:
    """Set the cause of an error, without the frames of the cause.

    A caller may keep the error, and frames would keep the batch's device memory. The log has them.
    """
    for error_in_chain in causes(cause):
        error_in_chain.__traceback__ = None
    error.__cause__ = cause
    return error


def _without_caller_frame(error: Exception) -> Exception:
    """Return an error of a callback without the frame of the code here that called it."""
    assert error.__traceback__ is not None  # noqa: S101  (it was raised)
    return error.with_traceback(error.__traceback__.tb_next)
