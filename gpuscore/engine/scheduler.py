"""The scheduler: decides what the next batch computes.

A request is *waiting* until it has KV pages for all its tokens, then *running* until all of it is
scheduled. `schedule` builds a batch in three steps:

1. Waiting requests get their pages, in the order of (priority, arrival), and become running. If too
   few pages are free for one, all behind it wait, too, so that nothing starves or deadlocks. While
   another request computes its prefix, a request waits and lets others pass.
2. If an item gave a non-finite row, its tree runs again alone, as the whole batch.
3. Otherwise running requests fill the batch up to the token budget, those with the lowest priority
   value first. Equal ones share it by deficit round robin (Shreedhar and Varghese, 1995): in each
   round a request may schedule QUANTUM more tokens, and it keeps the tokens that it could not use.
   So a request of 10 items is done within a few batches even behind one of 10,000 items.

A request's query is scheduled first, in prefill chunks if it is longer than a batch; its keys and
values stay in pages. Items follow in the same batch or in later ones. An item and all items that
continue it are a *tree*, which is never divided. An item that is longer than a batch comes last, in
chunks over pages of its own.

A batch is scheduled while the one before it is in flight. If that one fails, `reschedule` puts back
what both compute.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence

import numpy as np

from gpuscore.engine.jobs import Job, LongChunk, ScheduledChunk, shared_query_tokens
from gpuscore.engine.pages import PageKey, PagePool, RowsOf, page_keys
from gpuscore.engine.plan import QUERY, Plan
from gpuscore.engine.states import JobStates, StateSlots
from gpuscore.types.batch import BackendLimits

QUANTUM = 512  # tokens that a request may schedule per round
MIN_BUDGET = 16  # tokens; after out-of-memory errors the budget is halved down to this
RECOVERY = 32  # successful batches after which a halved budget is doubled


class Scheduler:
    """The owner of the waiting and running jobs and of the pages; single-threaded."""

    def __init__(self, limits: BackendLimits, *, prefix_cache: bool = True) -> None:
        self.limits = limits
        self.pages = PagePool(limits.num_pages)
        self.states = StateSlots(limits, prefix_cache)
        self.prefix_cache = prefix_cache
        self.token_budget = limits.max_tokens  # of the next batch
        self.chunk_unit = max(1, limits.deterministic_chunk)  # chunks end at multiples of it
        self.min_token_budget = max(MIN_BUDGET, self.chunk_unit)
        self.cached_tokens = 0  # query tokens found in the cache so far
        self._waiting: list[Job] = []  # for pages, by order
        self._running: dict[int, deque[Job]] = {}  # priority -> jobs, the next in turn first
        self._retries: deque[tuple[Job, int]] = deque()  # trees, by first item
        self._computing: dict[bytes, Job] = {}  # page digest -> the job that will publish it
        self._arrivals = 0
        self._successes = 0  # batches since the budget last changed

    def __len__(self) -> int:
        """Number of jobs with something left to schedule."""
        return len(self._waiting) + sum(map(len, self._running.values())) + len(self._retries)

    def fits(self, plan: Plan) -> bool:
        """Return True if a plan fits the pool when all its pages are free."""
        return sum(self._pages_needed(plan)) <= self.limits.num_pages

    def add(self, plan: Plan) -> Job:
        job = Job(plan, (plan.request.priority, self._arrivals))
        job.divide_items(self.limits)
        self._arrivals += 1
        insort(self._waiting, job, key=lambda j: j.order)
        return job

    def remove(self, job: Job) -> None:
        """Remove a finished, failed or cancelled job; its pages stay until its last batch ends."""
        if job.removed:
            return
        job.removed = True
        job.epoch += 1
        if job.query_pages is None:
            self._waiting.remove(job)
        if job.running:
            self._running[job.request.priority].remove(job)
            job.running = False
        self._retries = deque(retry for retry in self._retries if retry[0] is not job)
        for key in (job.keys or ())[job.published_pages :]:
            if self._computing.get(key.digest) is job:
                del self._computing[key.digest]
        self._release_if_done(job)

    # ---- what the next batch computes ----

    def schedule(self) -> list[ScheduledChunk]:
        """Return the chunks of the next batch, one per job; none if nothing can run now."""
        self._start_waiting()
        if self._retries and (retry := self._schedule_retry()):
            return [retry]
        batch: dict[Job, ScheduledChunk] = {}
        budget = self.token_budget
        for priority in sorted(self._running):
            budget = self._fill(batch, budget, self._running[priority])
        self._running = {priority: jobs for priority, jobs in self._running.items() if jobs}
        return [*batch.values()]

    def _start_waiting(self) -> None:
        """Move waiting jobs to the running ones, until one finds too few free pages."""
        for job in list(self._waiting):
            if job.first_missing_page in self._computing:
                continue
            if self.allocate(job):
                self._waiting.remove(job)
                self._enqueue(job)
            elif job.first_missing_page not in self._computing:
                return

    def _enqueue(self, job: Job) -> None:
        """Put a job in the queue of its priority, if something is left to schedule."""
        if not job.running and not job.fully_scheduled:
            job.running = True
            self._running.setdefault(job.request.priority, deque()).append(job)

    def _schedule_retry(self) -> ScheduledChunk | None:
        job, first = self._retries.popleft()
        if job.query_scheduled < job.query_length:  # the query was rescheduled meanwhile
            job.trees.appendleft(first)
            self._enqueue(job)
            return None
        end = job.query_length
        chunk = ScheduledChunk(
            job,
            job.epoch,
            (end, end),
            [*job.tree_of(first)],
            num_tokens=job.tree_tokens[first],
            is_retry=True,
        )
        job.in_flight.append(chunk)
        return chunk

    def _fill(self, batch: dict[Job, ScheduledChunk], budget: int, jobs: "deque[Job]") -> int:
        """Fill a batch with jobs of one priority, in turn; return the token budget that is left."""
        passed_over = []  # jobs that come first in the next batch
        while jobs and budget > 0:
            job = jobs.popleft()
            job.deficit = min(job.deficit + QUANTUM, self.limits.max_tokens)
            at = job.query_scheduled
            chunk = batch.get(job) or ScheduledChunk(job, job.epoch, (at, at))
            needed = self._next_tokens(chunk)
            if needed is None or (needed > budget and batch):
                passed_over.append(job)
                continue
            # A tree cannot be split, so a batch of its own may exceed a budget that was halved.
            allowance = max(min(job.deficit, budget), 0 if batch else needed)
            scheduled = self._extend(chunk, allowance)
            budget -= scheduled
            job.deficit = max(0, job.deficit - scheduled)
            if scheduled and job not in batch:
                batch[job] = chunk
                job.in_flight.append(chunk)
            if job.fully_scheduled:
                job.running = False
                job.deficit = 0
            else:
                jobs.append(job)
        jobs.extendleft(reversed(passed_over))
        return budget

    def _next_tokens(self, chunk: ScheduledChunk) -> int | None:
        """Return the fewest tokens by which a job's chunk can grow; None if it cannot grow.

        A long item reads the query from pages, which an earlier batch must have filled. All long
        items of a job use the same pages, so a batch has a chunk of at most one long item.
        """
        job = chunk.job
        if job.query_scheduled < job.query_length:
            return min(self.chunk_unit, job.query_length - job.query_scheduled)
        if job.trees:
            return job.tree_tokens[job.trees[0]]
        if chunk.long is not None or chunk.query[1] > chunk.query[0]:
            return None
        if job.long_scheduled > job.shared_length or self.chunk_unit == 1:
            return self.chunk_unit
        return max(self.chunk_unit, job.query_length - job.shared_length)

    def _extend(self, chunk: ScheduledChunk, allowance: int) -> int:
        """Add up to `allowance` tokens of a job to its chunk, in the order that the module's
        docstring names; return their number."""
        job = chunk.job
        left = allowance
        if job.query_scheduled < job.query_length:
            stop = self._chunk_end(job.query_scheduled, left, job.query_length)
            left -= stop - job.query_scheduled
            chunk.query = (chunk.query[0], stop)
            job.query_scheduled = stop
        if job.query_scheduled == job.query_length:
            items, left = job.take_trees(left)
            chunk.items += items
            long_is_next = left and not job.trees and job.long_items
            if long_is_next and self._next_tokens(chunk) is not None:
                left -= self._extend_long(chunk, left)
        chunk.num_tokens += allowance - left
        return allowance - left

    def _extend_long(self, chunk: ScheduledChunk, allowance: int) -> int:
        """Schedule up to `allowance` tokens of the job's first long item; return their number."""
        job = chunk.job
        item = job.long_items[0]
        start = job.long_scheduled
        # Chunks of the item end at multiples of the unit, counted from the item's first token.
        item_length = len(job.plan.item_ids[item])
        item_start = start - job.query_length  # negative while query tokens are computed again
        stop = job.query_length + self._chunk_end(item_start, allowance, item_length)
        if stop == start:  # the allowance is shorter than a chunk
            return 0
        chunk.long = LongChunk(item, start, stop)
        chunk.long_ends = stop == job.query_length + item_length
        job.long_scheduled = stop
        if chunk.long_ends:
            job.long_items.popleft()
            job.long_scheduled = job.shared_length
        return stop - start

    def _chunk_end(self, start: int, allowance: int, end: int) -> int:
        """Return the end of a chunk from `start` with at most `allowance` tokens."""
        stop = start + allowance
        return end if stop >= end else max(start, stop // self.chunk_unit * self.chunk_unit)

    # ---- what follows from a batch's end ----

    def succeeded(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Account for a collected batch, and publish the query pages that it has filled."""
        for chunk in chunks:
            if chunk.valid and not chunk.scores_query:
                self.publish(chunk.job, chunk.query[1])
            self._finish(chunk)
        self._successes += 1
        if self._successes >= RECOVERY and self.token_budget < self.limits.max_tokens:
            self.token_budget = min(2 * self.token_budget, self.limits.max_tokens)
            self._successes = 0

    def failed(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Reschedule the chunks of a failed batch.

        Chunks of these jobs that were launched since are rescheduled, too: the failed batch should
        have written the pages that they read.
        """
        for chunk in chunks:
            if chunk.valid:
                self.reschedule(chunk.job)
            self._finish(chunk)

    def shrink(self) -> None:
        """Evict all cached pages and halve the token budget, after an out-of-memory batch."""
        self.pages.evict(self.limits.num_pages)
        self.states.evict(self.limits.num_states)
        smallest = min(self.min_token_budget, self.token_budget)
        self.token_budget = max(smallest, self.token_budget // 2)
        self._successes = 0

    def retry_item(self, job: Job, item: int) -> None:
        """Compute an item once more: its tree alone in a batch, or a long item from its start."""
        if len(job.plan.item_ids[item]) <= self.limits.max_tokens:
            while job.tree_items is not None and item not in job.tree_items:
                item -= 1
            if (job, item) not in self._retries:
                self._retries.append((job, item))
        else:
            job.retried.add(item)
            job.long_items.append(item)
            self._enqueue(job)

    def retry_chunk(self, chunk: ScheduledChunk) -> None:
        """Compute a collected chunk of a long item once more, or else the query's chunk.

        The job's chunks that were launched since have read its pages; they are rescheduled, too.
        """
        job = chunk.job
        job.retried.add(QUERY if chunk.long is None else chunk.long.item)
        again = ScheduledChunk(
            job, job.epoch, chunk.query, long=chunk.long, long_ends=chunk.long_ends
        )
        job.in_flight.insert(0, again)
        self.reschedule(job)
        job.in_flight.remove(again)

    def reschedule(self, job: Job) -> None:
        """Schedule again what a job's chunks in flight compute; their results will be ignored."""
        job.epoch += 1
        long_chunks: list[LongChunk] = []  # the last one first
        for chunk in reversed(job.in_flight):
            if chunk.epoch != job.epoch - 1:
                continue
            if job.states is None:
                job.query_scheduled = min(job.query_scheduled, chunk.query[0])
            elif chunk.query[1] > chunk.query[0]:  # its state is overwritten, see `states`
                job.query_scheduled = job.cached_tokens
            job.trees.extendleft(reversed(chunk.trees))
            if chunk.long is not None:
                long_chunks.append(chunk.long)
                if chunk.long_ends:
                    job.long_items.appendleft(chunk.long.item)
        if long_chunks:
            # A long item starts again if the next one has overwritten its pages, or a chunk has
            # overwritten its state.
            one_item = len({long.item for long in long_chunks}) == 1 and job.states is None
            job.long_scheduled = long_chunks[-1].start if one_item else job.shared_length
        if not job.removed:
            self._enqueue(job)

    def _finish(self, chunk: ScheduledChunk) -> None:
        """Remove a chunk whose batch has ended from those in flight."""
        chunk.job.in_flight.remove(chunk)
        self._release_if_done(chunk.job)

    # ---- pages and states ----

    def allocate(self, job: Job) -> bool:
        """Give a job all its pages, as far as possible from the prefix cache.

        Returns:
            False if too few are free, or if another job is computing the job's prefix; the job then
            holds nothing.
        """
        keys = self._keys(job)
        cached = self._find_prefix(job, keys)
        job.first_missing_page = self._first_missing_page(keys[len(cached) :])
        for_query, for_items = self._pages_needed(job.plan)
        new = None
        if job.first_missing_page not in self._computing and self._take_states(job, len(cached)):
            new = self.pages.allocate(for_query - len(cached) + for_items)
        if new is None:
            self.pages.release(cached)
            self._release_states(job)
            return False
        new_for_query = new[: for_query - len(cached)]
        job.query_pages = new_for_query
        if cached:
            job.query_pages = np.concatenate((np.array(cached, np.int32), new_for_query))
        job.item_pages = new[for_query - len(cached) :]
        job.published_pages = len(cached)
        job.cached_tokens = len(cached) * self.limits.page_size
        job.query_scheduled = job.cached_tokens
        self.cached_tokens += job.cached_tokens
        for number, key in enumerate(keys[len(cached) :], len(cached) + 1):
            if job.states is None or number * self.limits.page_size in job.states.kept:
                self._computing[key.digest] = job
        return True

    def _keys(self, job: Job) -> tuple[PageKey, ...]:
        """Return the keys of the query's full pages that end within whole chunks."""
        if job.keys is None:
            job.keys = ()
            if self.prefix_cache:
                whole_chunks = job.query_length // self.chunk_unit * self.chunk_unit
                job.keys = tuple(
                    page_keys(
                        self.limits.identity,
                        job.request.salt,
                        job.plan.query_ids[:whole_chunks],
                        self.limits.page_size,
                    )
                )
        return job.keys

    def _find_prefix(self, job: Job, keys: tuple[PageKey, ...]) -> list[int]:
        """Return the cached pages of whole chunks that the job can use, with a reference each."""
        pages, job.cached_rows = self.pages.find(keys, job.request)
        tokens = len(pages) * self.limits.page_size // self.chunk_unit * self.chunk_unit
        usable = tokens // self.limits.page_size
        if self.limits.num_states:
            usable, slot = self.states.find_last(keys, usable)
            job.states = JobStates(cached=slot)
        self.pages.release(pages[usable:])
        del job.cached_rows[usable:]
        return pages[:usable]

    def _first_missing_page(self, keys: tuple[PageKey, ...]) -> bytes:
        """Return the digest of a query's first page that is not cached; in a model with states, of
        the first one at whose end a job computes a state. b"" = there is none."""
        for key in keys:
            if not self.limits.num_states or key.digest in self._computing:
                return key.digest
        return b""

    def _pages_needed(self, plan: Plan) -> tuple[int, int]:
        """Return the pages for the query, and for the longest item if it is longer than a batch."""
        page_size = self.limits.page_size
        query_length = len(plan.query_ids)
        longest = max(map(len, plan.item_ids))
        for_query = -(-query_length // page_size)
        if longest <= self.limits.max_tokens:
            return for_query, 0
        shared = shared_query_tokens(query_length, self.limits) // page_size
        return for_query, -(-(query_length + longest) // page_size) - shared

    def _take_states(self, job: Job, cached_pages: int) -> bool:
        """Give a job of a model with states its slots; False if too few are free."""
        if job.states is None:
            return True
        return self.states.take(
            job.states,
            cached_pages * self.limits.page_size,
            job.query_length,
            job.shared_length if job.long_items else None,
        )

    def publish(self, job: Job, length: int, rows: RowsOf | None = None) -> None:
        """Publish the full pages of the query's first `length` tokens, with `rows` if scored."""
        keys = job.keys or ()
        page_size = self.limits.page_size
        assert job.query_pages is not None  # noqa: S101  (it has run)
        while job.published_pages < min(len(keys), length // page_size):
            key = keys[job.published_pages]
            page = int(job.query_pages[job.published_pages])
            start = job.published_pages * page_size
            stop = start + page_size
            self.pages.publish(page, key, None if rows is None else rows(start, stop))
            if job.states is not None and stop in job.states.kept:
                self.states.publish(job.states.kept[stop], key)
            self._computing.pop(key.digest, None)
            job.published_pages += 1

    def _release_if_done(self, job: Job) -> None:
        if job.removed and not job.in_flight and job.query_pages is not None:
            self.pages.release(job.query_pages)
            if job.item_pages is not None:
                self.pages.release(job.item_pages)
            job.query_pages = job.item_pages = None
            self._release_states(job)

    def _release_states(self, job: Job) -> None:
        if job.states is not None:
            self.states.release(job.states.slots)
            job.states = None
