"""Which work runs next: splits requests into batches within the backend's token budget.

A request's query runs first, in chunks where it is longer than a batch; its keys and values stay
in pages. Items follow, as many as fit, in the same batch as the end of the query or in later ones.
An item that is longer than a whole batch is itself run in chunks, over pages of its own.

Requests are served by (priority, arrival). The first one that does not get its pages waits, and
all behind it, so that nothing starves.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from gpuscore.engine.pages import PagePool
from gpuscore.engine.planner import Prefix, Segment, pack, page_slots
from gpuscore.types import BackendLimits, Int32Array, PackedBatch, ScoreRequest


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the scheduler."""

    request: ScoreRequest
    order: tuple[int, int]  # (priority, arrival)
    query_pages: Int32Array | None = None  # None until it has its pages
    item_pages: Int32Array | None = None  # for items longer than a batch
    query_done: int = 0  # tokens of the query handed out so far
    next_item: int = 0
    item_done: int = 0  # tokens of a long item (its query tail included) handed out so far
    in_flight: int = 0  # batches that have not been collected

    @property
    def exhausted(self) -> bool:
        return self.next_item == len(self.request.item_ids)


@dataclass(frozen=True, slots=True)
class Work:
    """A batch and whose rows it scores: row i belongs to item `owners[i][1]` of its job."""

    batch: PackedBatch
    owners: tuple[tuple[Job, int], ...]
    jobs: tuple[Job, ...]  # every job with a segment in the batch ...
    tokens: tuple[int, ...]  # ... and how many tokens of the batch are its own


@dataclass(slots=True)
class _Draft:
    """A batch being filled."""

    budget: int
    segments: list[Segment] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    owners: list[tuple[Job, int]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def prefix(self, length: int, pages: Int32Array) -> int:
        self.prefixes.append(Prefix(length, pages))
        return len(self.prefixes) - 1

    def add(self, segment: Segment) -> int:
        self.segments.append(segment)
        self.budget -= len(segment.token_ids)
        return len(self.segments) - 1


class Scheduler:
    """Owns the waiting jobs and the pages; single-threaded."""

    def __init__(self, limits: BackendLimits) -> None:
        self.limits = limits
        self.pages = PagePool(limits.num_pages)
        self._jobs: list[Job] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, request: ScoreRequest) -> Job:
        job = Job(request, (request.priority, self._arrivals))
        self._arrivals += 1
        self._jobs.append(job)
        self._jobs.sort(key=lambda j: j.order)
        return job

    def fits(self, request: ScoreRequest) -> bool:
        """Whether the request could run if it were alone."""
        return sum(self._pages_needed(request)) <= self.limits.num_pages

    def remove(self, job: Job) -> None:
        """Forget a job that is finished, failed or cancelled, once nothing of it is running."""
        if job in self._jobs:
            self._jobs.remove(job)
        if job.in_flight == 0:
            self._release(job)

    def collected(self, work: Work) -> None:
        """A batch has come back, with results or with an error."""
        for job in work.jobs:
            job.in_flight -= 1
            if job.in_flight == 0 and job not in self._jobs:
                self._release(job)

    def next_batch(self) -> Work | None:
        """The next batch, or None if nothing can run now."""
        draft = _Draft(budget=self.limits.max_tokens)
        for job in list(self._jobs):
            if draft.budget == 0 or not self._has_pages(job):
                break
            before = draft.budget
            self._fill(draft, job)
            if draft.budget < before:
                draft.jobs.append(job)
                draft.tokens.append(before - draft.budget)
                job.in_flight += 1
            if job.exhausted:
                self._jobs.remove(job)
        if not draft.segments:
            return None
        need_top = any(job.request.need_top for job in draft.jobs)
        batch = pack(draft.segments, draft.prefixes, need_top=need_top)
        return Work(batch, tuple(draft.owners), tuple(draft.jobs), tuple(draft.tokens))

    def _fill(self, draft: _Draft, job: Job) -> None:
        """Put as much of the job into the draft as fits."""
        assert job.query_pages is not None  # noqa: S101  (next_batch saw to it)
        query = job.request.query_ids
        cached = job.query_done
        row = draft.prefix(cached, job.query_pages)
        parent = -1
        if cached < len(query):
            stop = min(len(query), cached + draft.budget)
            slots = page_slots(job.query_pages, cached, stop, self.limits.page_size)
            parent = draft.add(Segment(query[cached:stop], cached, row, slots=slots))
            job.query_done = stop
        if job.query_done == len(query):
            self._fill_items(draft, job, row, parent)

    def _fill_items(self, draft: _Draft, job: Job, row: int, parent: int) -> None:
        request, cut = job.request, len(job.request.query_ids)
        # A long item reads the query from pages, so those must be from earlier batches; and long
        # items share their pages, so one batch holds a chunk of at most one of them.
        long_item_possible = parent == -1
        while draft.budget and not job.exhausted:
            index = job.next_item
            tokens = request.item_ids[index]
            if len(tokens) > self.limits.max_tokens:
                if not long_item_possible or not self._fill_long_item(draft, job):
                    return
                long_item_possible = False
                continue
            if len(tokens) > draft.budget:
                return
            draft.add(
                Segment(
                    tokens,
                    cut,
                    row,
                    parent=parent,
                    label_ids=request.label_ids[index],
                    need_lse=request.need_lse,
                )
            )
            draft.owners.append((job, index))
            job.next_item += 1

    def _fill_long_item(self, draft: _Draft, job: Job) -> bool:
        """Add the next chunk of an item that is longer than a batch; True when it was the last.

        Its sequence shares the query's full pages and recomputes the rest of the query, because
        two sequences cannot continue the same half-filled page.
        """
        assert job.query_pages is not None  # noqa: S101  (next_batch saw to it)
        assert job.item_pages is not None  # noqa: S101
        request, index, page_size = job.request, job.next_item, self.limits.page_size
        shared_pages = len(request.query_ids) // page_size
        base = shared_pages * page_size
        tail = np.concatenate((request.query_ids[base:], request.item_ids[index]))
        start = base + job.item_done
        stop = min(base + len(tail), start + draft.budget)
        last = stop == base + len(tail)
        pages = np.concatenate((job.query_pages[:shared_pages], job.item_pages))
        draft.add(
            Segment(
                tail[start - base : stop - base],
                start,
                draft.prefix(start, pages),
                slots=None if last else page_slots(pages, start, stop, page_size),
                label_ids=request.label_ids[index] if last else None,
                need_lse=request.need_lse and last,
            )
        )
        job.item_done = 0 if last else stop - base
        if last:
            draft.owners.append((job, index))
            job.next_item += 1
        return last

    def _has_pages(self, job: Job) -> bool:
        """Take the pages of a job that has none yet."""
        if job.query_pages is not None:
            return True
        for_query, for_items = self._pages_needed(job.request)
        pages = self.pages.allocate(for_query + for_items)
        if pages is None:
            return False
        job.query_pages, job.item_pages = pages[:for_query], pages[for_query:]
        return True

    def _pages_needed(self, request: ScoreRequest) -> tuple[int, int]:
        """Pages of the query, and of its longest item if that is longer than a batch."""
        page_size, cut = self.limits.page_size, len(request.query_ids)
        longest = max(map(len, request.item_ids))
        for_query = -(-cut // page_size)
        if longest <= self.limits.max_tokens:
            return for_query, 0
        return for_query, -(-(cut + longest) // page_size) - cut // page_size

    def _release(self, job: Job) -> None:
        for pages in self._taken(job):
            self.pages.free(pages)
        job.query_pages = job.item_pages = None

    @staticmethod
    def _taken(job: Job) -> Iterator[Int32Array]:
        for pages in (job.query_pages, job.item_pages):
            if pages is not None:
                yield pages
