"""The scheduler: splits requests into batches within a token budget, fairly.

A request's query runs first, in chunks if it is longer than a batch; its keys and values stay in
pages. The items follow, in the batch with the end of the query or in later ones. An item that is
longer than a batch runs in chunks too, over additional pages. Families run in one batch.

Requests with a lower priority value go first. Among equals, batches are filled by deficit round
robin (Shreedhar and Varghese, 1995): each round lets every request take QUANTUM more tokens, and
a request keeps the tokens that it could not use. So a request of 10 items is done within a few
batches even behind one of 10,000 items. A request takes all its pages when it starts. If too few
are free, it waits in the order of (priority, arrival), and no request behind it starts first, so
nothing deadlocks or starves. A request whose query another request is computing waits for it.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence

import numpy as np

from gpuscore.engine.jobs import Job, Share, long_base, long_rest
from gpuscore.engine.pages import PageKey, PagePool, RowsOf, page_keys
from gpuscore.engine.plan import QUERY, Plan
from gpuscore.engine.states import JobStates, StateSlots
from gpuscore.types.batch import BackendLimits

QUANTUM = 512  # tokens that a request may take per round
MIN_BUDGET = 16  # tokens; out-of-memory batches are halved down to this
RECOVERY = 32  # successful batches after which a halved budget is doubled


class Scheduler:
    """The owner of the waiting and active jobs and of the pages; single-threaded."""

    def __init__(self, limits: BackendLimits, *, prefix_cache: bool = True) -> None:
        self.limits = limits
        self.pages = PagePool(limits.num_pages)
        self.states = StateSlots(limits, prefix_cache)
        self.prefix_cache = prefix_cache
        self.budget = limits.max_tokens
        self.chunk = max(1, limits.deterministic_chunk)  # chunks are multiples of it, in tokens
        self.min_budget = max(MIN_BUDGET, self.chunk)  # budgets are halved down to this
        self.cached_tokens = 0  # query tokens found in the cache so far
        self._waiting: list[Job] = []  # for pages, by order
        self._active: dict[int, deque[Job]] = {}  # priority -> jobs with work for a batch
        self._alone: deque[tuple[Job, int]] = deque()  # items to run in separate batches
        self._computing: dict[bytes, Job] = {}  # page digest -> the job that will publish it
        self._arrivals = 0
        self._successes = 0  # batches since the budget last changed

    def __len__(self) -> int:
        """Number of jobs with work that no batch has taken."""
        return len(self._waiting) + sum(map(len, self._active.values())) + len(self._alone)

    def fits(self, plan: Plan) -> bool:
        """Return True if a plan fits the pool when all its pages are free."""
        return sum(self._pages_needed(plan)) <= self.limits.num_pages

    def add(self, plan: Plan) -> Job:
        job = Job(plan, (plan.request.priority, self._arrivals))
        job.divide_items(self.limits.max_tokens)
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
        self._deactivate(job)
        self._alone = deque(pair for pair in self._alone if pair[0] is not job)
        for key in (job.keys or ())[job.published :]:
            if self._computing.get(key.digest) is job:
                del self._computing[key.digest]
        self._release_if_done(job)

    def next_batch(self) -> list[Share]:
        """Return the shares of the next batch, none if nothing can run now."""
        self._start_waiting()
        if self._alone and (alone := self._alone_batch()):
            return alone
        shares: dict[Job, Share] = {}
        budget = self.budget
        for priority in sorted(self._active):
            budget = self._hand_out(self._active[priority], shares, budget)
        self._active = {priority: ring for priority, ring in self._active.items() if ring}
        return [*shares.values()]

    def succeeded(self, shares: Sequence[Share]) -> None:
        """Settle a collected batch, and publish the query pages that it has filled."""
        for share in shares:
            if share.valid and not share.scores_query:
                self.publish(share.job, share.query[1])
            self._settle(share)
        self._successes += 1
        if self._successes >= RECOVERY and self.budget < self.limits.max_tokens:
            self.budget = min(2 * self.budget, self.limits.max_tokens)
            self._successes = 0

    def failed(self, shares: Sequence[Share]) -> None:
        """Take back the work of a failed batch, so that the jobs that remain run it again.

        Work of these jobs that was launched since is taken back too: its pages were not written.
        """
        for share in shares:
            if share.valid:
                self.take_back(share.job)
            self._settle(share)

    def shrink(self) -> None:
        """Evict all cached pages and halve the token budget, after an out-of-memory batch."""
        self.pages.evict(self.limits.num_pages)
        self.states.evict(self.limits.num_states)
        self.budget = max(min(self.min_budget, self.budget), self.budget // 2)
        self._successes = 0

    def retry_alone(self, job: Job, item: int) -> None:
        """Run an item once more: its family alone in a batch, or an item over a batch in chunks."""
        if len(job.plan.item_ids[item]) <= self.limits.max_tokens:
            while job.family is not None and item not in job.family:
                item -= 1
            if (job, item) not in self._alone:
                self._alone.append((job, item))
        else:
            job.retried.add(item)
            job.long.append(item)
            self._activate(job)

    def retry_chunk(self, share: Share) -> None:
        """Run a collected share again: the long item's chunk, or else the query's chunk.

        The job's work that was launched since has read the chunk's pages; it is taken back too.
        """
        job = share.job
        job.retried.add(QUERY if share.long is None else share.long[0])
        chunk = Share(job, job.epoch, share.query, long=share.long, long_ends=share.long_ends)
        job.running.insert(0, chunk)
        self.take_back(job)
        job.running.remove(chunk)

    # ---- pages ----

    def _start_waiting(self) -> None:
        for job in list(self._waiting):
            if job.lacks in self._computing:
                continue
            if not self.take_pages(job):
                if job.lacks in self._computing:
                    continue
                return
            self._waiting.remove(job)
            self._activate(job)

    def take_pages(self, job: Job) -> bool:
        """Give a job all its pages; False if too few are free or another job computes its query."""
        keys = self._keys(job)
        cached = self._find(job, keys)
        job.lacks = self._lacks(keys[len(cached) :])
        for_query, for_items = self._pages_needed(job.plan)
        new = None
        if job.lacks not in self._computing and self._take_states(job, len(cached)):
            new = self.pages.allocate(for_query - len(cached) + for_items)
        if new is None:
            self.pages.release(cached)
            self._release_states(job)
            return False
        split = for_query - len(cached)
        own = new[:split]
        job.query_pages = np.concatenate((np.array(cached, np.int32), own)) if cached else own
        job.item_pages = new[split:]
        job.published = len(cached)
        job.query_done = len(cached) * self.limits.page_size
        job.cached = job.query_done
        self.cached_tokens += job.cached
        for number, key in enumerate(keys[len(cached) :], len(cached) + 1):
            if job.states is None or number * self.limits.page_size in job.states.kept:
                self._computing[key.digest] = job
        return True

    def _lacks(self, keys: tuple[PageKey, ...]) -> bytes:
        """Return the digest of a query's first page that is not cached; or, of a model with states,
        of the first one at whose end a state is being computed."""
        for key in keys:
            if not self.limits.num_states or key.digest in self._computing:
                return key.digest
        return b""

    def _take_states(self, job: Job, cached: int) -> bool:
        """Give a job of a model with states its slots; False if too few are free."""
        if job.states is None:
            return True
        cut = job.cut
        long = max(map(len, job.plan.item_ids)) > self.limits.max_tokens
        base = long_base(cut, self.limits) if long else None
        return self.states.take(job.states, cached * self.limits.page_size, cut, base)

    def _release_states(self, job: Job) -> None:
        if job.states is not None:
            self.states.release(job.states.slots)
            job.states = None

    def _find(self, job: Job, keys: tuple[PageKey, ...]) -> list[int]:
        """Return the cached pages of whole chunks that the job can use, with a reference each."""
        pages, job.cached_rows = self.pages.find(keys, job.request)
        count = len(pages) * self.limits.page_size // self.chunk * self.chunk
        whole = count // self.limits.page_size
        if self.limits.num_states:
            whole, slot = self.states.find_last(keys, whole)
            job.states = JobStates(cached=slot)
        self.pages.release(pages[whole:])
        del job.cached_rows[whole:]
        return pages[:whole]

    def _keys(self, job: Job) -> tuple[PageKey, ...]:
        if job.keys is None:
            job.keys = ()
            if self.prefix_cache:
                size, salt = self.limits.page_size, job.request.salt
                tokens = job.plan.query_ids[: job.cut // self.chunk * self.chunk]
                job.keys = tuple(page_keys(self.limits.identity, salt, tokens, size))
        return job.keys

    def publish(self, job: Job, length: int, rows: RowsOf | None = None) -> None:
        """Publish the full pages of the query's first `length` tokens; `rows` if it is scored."""
        keys, size = job.keys or (), self.limits.page_size
        assert job.query_pages is not None  # noqa: S101  (it has run)
        while job.published < min(len(keys), length // size):
            key, start = keys[job.published], job.published * size
            page = int(job.query_pages[job.published])
            self.pages.publish(page, key, None if rows is None else rows(start, start + size))
            if job.states is not None and start + size in job.states.kept:
                self.states.publish(job.states.kept[start + size], key)
            self._computing.pop(key.digest, None)
            job.published += 1

    def _pages_needed(self, plan: Plan) -> tuple[int, int]:
        """Return the pages for the query, and for the longest item if it is longer than a batch."""
        page_size, cut = self.limits.page_size, len(plan.query_ids)
        longest = max(map(len, plan.item_ids))
        for_query = -(-cut // page_size)
        if longest <= self.limits.max_tokens:
            return for_query, 0
        shared = long_base(cut, self.limits) // page_size
        return for_query, -(-(cut + longest) // page_size) - shared

    def _settle(self, share: Share) -> None:
        share.job.running.remove(share)
        self._release_if_done(share.job)

    def _release_if_done(self, job: Job) -> None:
        if job.removed and not job.running and job.query_pages is not None:
            self.pages.release(job.query_pages)
            if job.item_pages is not None:
                self.pages.release(job.item_pages)
            job.query_pages = job.item_pages = None
            self._release_states(job)

    # ---- filling a batch ----

    def _activate(self, job: Job) -> None:
        if not job.active and not job.exhausted:
            job.active = True
            self._active.setdefault(job.request.priority, deque()).append(job)

    def _deactivate(self, job: Job) -> None:
        if job.active:
            self._active[job.request.priority].remove(job)
            job.active = False

    def _hand_out(self, ring: "deque[Job]", shares: dict[Job, Share], budget: int) -> int:
        """Add work of one ring's jobs to a batch; return the token budget that is left."""
        passed_over = []  # jobs that come first in the next batch
        while ring and budget > 0:
            job = ring.popleft()
            job.deficit = min(job.deficit + QUANTUM, self.limits.max_tokens)
            share = shares.get(job) or Share(job, job.epoch, (job.query_done, job.query_done))
            cost = self._next_cost(share)
            if cost is None or (cost > budget and shares):
                passed_over.append(job)
                continue
            # A single item cannot be split, so it may exceed a budget that was halved.
            allowance = max(min(job.deficit, budget), 0 if shares else cost)
            taken = self._take(share, allowance)
            budget -= taken
            job.deficit = max(0, job.deficit - taken)
            if taken and job not in shares:
                shares[job] = share
                job.running.append(share)
            if job.exhausted:
                job.active, job.deficit = False, 0
            else:
                ring.append(job)
        ring.extendleft(reversed(passed_over))
        return budget

    def _next_cost(self, share: Share) -> int | None:
        """Return the tokens of the job's next piece; None if it cannot join this share.

        A long item reads the query from pages, which an earlier batch must have filled. All long
        items of a job use the same pages, so a batch has a chunk of at most one long item.
        """
        job = share.job
        if job.query_done < job.cut:
            return min(self.chunk, job.cut - job.query_done)
        if job.short:
            return job.tokens[job.short[0]]
        if share.long is not None or share.query[1] > share.query[0]:
            return None
        rest = long_rest(job.cut, self.limits)
        return self.chunk if job.long_done or self.chunk == 1 else max(self.chunk, rest)

    def _take(self, share: Share, allowance: int) -> int:
        """Move up to `allowance` tokens of work from the job to its share; return the number."""
        job, left = share.job, allowance
        if job.query_done < job.cut:
            stop = self._chunk_end(job.query_done, left, job.cut)
            left -= stop - job.query_done
            share.query, job.query_done = (share.query[0], stop), stop
        if job.query_done == job.cut:
            items, left = job.take_short(left)
            share.items += items
            if left and not job.short and job.long and self._next_cost(share) is not None:
                left -= self._take_long(share, left)
        share.tokens += allowance - left
        return allowance - left

    def _take_long(self, share: Share, allowance: int) -> int:
        job = share.job
        item, start = job.long[0], job.long_done
        rest = long_rest(job.cut, self.limits)
        length = rest + len(job.plan.item_ids[item])
        stop = rest + self._chunk_end(start - rest, allowance, length - rest)
        if stop == start:  # the allowance is shorter than a chunk
            return 0
        share.long, share.long_ends, share.rest = (item, start, stop), stop == length, rest
        job.long_done = stop
        if share.long_ends:
            job.long.popleft()
            job.long_done = 0
        return stop - start

    def _chunk_end(self, start: int, allowance: int, end: int) -> int:
        """Return the end of a chunk from `start` with at most `allowance` tokens."""
        stop = start + allowance
        return end if stop >= end else max(start, stop // self.chunk * self.chunk)

    def _alone_batch(self) -> list[Share]:
        job, item = self._alone.popleft()
        if job.query_done < job.cut:  # the query was taken back meanwhile
            job.short.appendleft(item)
            self._activate(job)
            return []
        items, tokens = [*job.family_of(item)], job.tokens[item]
        share = Share(job, job.epoch, (job.cut, job.cut), items, tokens=tokens, alone=True)
        job.running.append(share)
        return [share]

    def take_back(self, job: Job) -> None:
        """Return the work of all running shares to their job, which then runs it again."""
        job.epoch += 1
        chunks = []  # of long items, the last chunk first
        for share in reversed(job.running):
            if share.epoch != job.epoch - 1:
                continue
            if job.states is None:
                job.query_done = min(job.query_done, share.query[0])
            elif share.query[1] > share.query[0]:  # its state is overwritten, see `states`
                job.query_done = job.cached
            job.short.extendleft(reversed(share.firsts))
            if share.long is not None:
                chunks.append(share.long)
                if share.long_ends:
                    job.long.appendleft(share.long[0])
        if chunks:
            # Once the next long item has overwritten the pages of the one before, that one must
            # start again; and once a chunk has overwritten its state.
            one_item = len({item for item, _, _ in chunks}) == 1 and job.states is None
            job.long_done = chunks[-1][1] if one_item else 0
        if not job.removed:
            self._activate(job)
