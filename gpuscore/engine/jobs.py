"""What the scheduler knows of a request (`Job`), and what one batch computes of it
(`ScheduledChunk`). `build_batch` turns a batch's chunks into segments and cached prefixes."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from typing import NamedTuple

import numpy as np

from gpuscore.engine.pages import PageKey, PageRows
from gpuscore.engine.plan import QUERY, Plan
from gpuscore.engine.states import JobStates
from gpuscore.types.batch import (
    NO_TOKENS,
    BackendLimits,
    Int32Array,
    PackedBatch,
    Prefix,
    Segment,
    SegmentColumns,
    pack_columns,
    page_slots,
)
from gpuscore.types.request import ScoreRequest


@dataclass(slots=True, eq=False)
class Job:
    """A request in the scheduler: what is left to schedule of it, and what it holds.

    Items that fit a batch are scheduled in whole trees: an item with all its descendants. Longer
    items are scheduled in chunks, one item after the other; they have no descendants.
    """

    plan: Plan
    order: tuple[int, int]  # (priority, arrival)

    # What is left to schedule.
    query_scheduled: int = 0  # query tokens that are cached or in a batch
    trees: deque[int] = field(default_factory=deque)  # first items of trees that fit a batch
    long_items: deque[int] = field(default_factory=deque)
    # Tokens of the first long item's prompt that are scheduled, the query's tokens included.
    long_scheduled: int = 0
    running: bool = False  # it has its pages and something left to schedule, see the scheduler
    deficit: int = 0  # tokens that it may still schedule in this round, see the scheduler

    # What batches that are not collected yet compute.
    in_flight: list["ScheduledChunk"] = field(default_factory=list)
    epoch: int = 0  # grows when chunks in flight are to be computed again
    retried: set[int] = field(default_factory=set)  # long items or QUERY that run a second time
    removed: bool = False

    # What it holds of the KV cache.
    keys: tuple[PageKey, ...] | None = None  # of the query's full pages; made when first needed
    first_missing_page: bytes = b""  # digest of the query's first page that was not cached
    cached_tokens: int = 0  # of the query
    cached_rows: list[PageRows | None] = field(default_factory=list)  # of the cached pages
    published_pages: int = 0  # full pages of the query that other jobs can find
    query_pages: Int32Array | None = None  # None until the job has its pages
    item_pages: Int32Array | None = None  # for long items
    states: JobStates | None = None  # slots of a model with linear layers

    # Set by `divide_items`.
    shared_length: int = 0  # see `shared_query_tokens`
    tree_items: dict[int, range] | None = None  # by first item; None = each item is a tree
    tree_tokens: dict[int, int] | list[int] = field(default_factory=list)  # by first item

    @property
    def request(self) -> ScoreRequest:
        return self.plan.request

    @property
    def query_length(self) -> int:
        return len(self.plan.query_ids)

    def divide_items(self, limits: BackendLimits) -> None:
        """Divide the items into trees that fit a batch and longer items."""
        lengths = [*map(len, self.plan.item_ids)]
        self.tree_tokens = lengths
        firsts: Iterable[int] = range(len(lengths))
        if self.plan.parents is not None:
            self.tree_items = {tree.start: tree for tree in self.plan.trees()}
            self.tree_tokens = {
                first: sum(lengths[tree.start : tree.stop])
                for first, tree in self.tree_items.items()
            }
            firsts = self.tree_items
        tokens = self.tree_tokens
        self.trees.extend([first for first in firsts if tokens[first] <= limits.max_tokens])
        self.long_items.extend([first for first in firsts if tokens[first] > limits.max_tokens])
        # In a plan, a tree of several items always fits a batch.
        assert all(len(self.tree_of(first)) == 1 for first in self.long_items)  # noqa: S101
        self.shared_length = shared_query_tokens(self.query_length, limits)
        self.long_scheduled = self.shared_length

    def tree_of(self, first: int) -> range:
        """Return the items of the tree that begins with `first`."""
        if self.tree_items is None:
            return range(first, first + 1)
        return self.tree_items[first]

    def take_trees(self, allowance: int) -> tuple[list[int], int]:
        """Take the next trees that have up to `allowance` tokens together.

        Returns:
            Their items, and the tokens of the allowance that are left.
        """
        trees = self.trees
        tokens = self.tree_tokens
        items: list[int] = []
        while trees and tokens[trees[0]] <= allowance:
            first = trees.popleft()
            allowance -= tokens[first]
            if self.tree_items is None:
                items.append(first)
            else:
                items.extend(self.tree_items[first])
        return items, allowance

    def state_after(self, tokens: int) -> int:
        """Return the slot of the state after the query's first `tokens` tokens; -1 = none."""
        if self.states is None or tokens == 0:
            return -1
        return self.states.cached if tokens == self.cached_tokens else self.states.query

    def kept_states(self, start: int, stop: int, page_size: int) -> list[tuple[int, int]]:
        """Return the states to keep of a chunk, each as (tokens of the chunk up to it, slot)."""
        if self.states is None:
            return []
        # States that other jobs may read must not be overwritten.
        first = max(start, self.published_pages * page_size)
        kept = [(at - start, slot) for at, slot in self.states.kept.items() if first < at <= stop]
        return [*sorted(kept), (stop - start, self.states.query)]

    @property
    def fully_scheduled(self) -> bool:
        return self.query_scheduled == self.query_length and not self.trees and not self.long_items


class LongChunk(NamedTuple):
    """Tokens `start` to `stop` - 1 of a long item's prompt, whose first tokens are the query's."""

    item: int
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class ScheduledChunk:
    """What one batch computes of a job: a chunk of its query, trees, a chunk of a long item."""

    job: Job
    epoch: int  # the job's when the chunk was scheduled
    query: tuple[int, int]  # (start, stop) in the query; may be empty
    items: list[int] = field(default_factory=list)  # of whole trees, in order
    long: LongChunk | None = None
    long_ends: bool = False  # it is the long item's last; others have rows only with `readouts`
    num_tokens: int = 0
    is_retry: bool = False  # a tree that is computed again alone, after a non-finite row

    @property
    def trees(self) -> list[int]:
        """The first items of the chunk's trees."""
        tree_items = self.job.tree_items
        if tree_items is None:
            return self.items
        return [item for item in self.items if item in tree_items]

    @property
    def scores_query(self) -> bool:
        """True if a token of the chunk's part of the query is scored."""
        return bool(self.job.request.query_part(*self.query))

    @property
    def scored_items(self) -> list[int]:
        """The items whose last token's row is scored, in order."""
        plan = self.job.plan
        items = self.items
        if plan.rows is not None:
            items = [item for item in items if len(plan.label_ids[item])]
        return [*items, self.long.item] if self.long and self.long_ends else items

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Runs of scored rows, in order: (item or QUERY, number of its first row, number of rows).

        An item has one row, its last token's, or with `readouts` any number.
        """
        plan = self.job.plan
        if plan.reads is None:
            return [(item, 0, 1) for item in self.scored_items]
        start, stop = self.query
        first = len(plan.request.query_part(0, start).places)
        count = len(plan.request.query_part(start, stop).places)
        spans = [(QUERY, first, count)] if count else []
        spans += [(item, 0, len(plan.reads[item].places)) for item in self.items]
        if self.long is not None:
            rows = plan.reads[self.long.item]
            first = rows.before(self.long.start - self.job.query_length)
            last = rows.before(self.long.stop - self.job.query_length)
            spans.append((self.long.item, first, last - first))
        return spans

    @property
    def num_rows(self) -> int:
        """Number of scored rows."""
        return sum(count for _, _, count in self.spans)

    @property
    def valid(self) -> bool:
        """False once its job was rescheduled: the chunk's results are then ignored."""
        return self.epoch == self.job.epoch

    @property
    def num_parts(self) -> int:
        """Number of parts that could run in separate batches."""
        return len(self.trees) + (self.long is not None) + (self.query[1] > self.query[0])


def is_minimal(chunks: Sequence[ScheduledChunk], min_tokens: int) -> bool:
    """True if a batch cannot be made smaller: one tree, or at most `min_tokens` tokens."""
    if len(chunks) > 1 or chunks[0].num_parts > 1:
        return False
    return bool(chunks[0].items) or chunks[0].num_tokens <= min_tokens


def build_batch(chunks: Sequence[ScheduledChunk], limits: BackendLimits) -> PackedBatch:
    """Return the batch that computes these chunks.

    Its scored rows stand in the order of the chunks, and in a chunk in the order of its `spans`.
    """
    segments = SegmentColumns()
    prefixes: list[Prefix] = []
    for chunk in chunks:
        _add_chunk(chunk, limits, segments, prefixes)
    num_top = max(chunk.job.request.num_top for chunk in chunks)
    return pack_columns(segments, prefixes, num_top=num_top)


def _add_chunk(
    chunk: ScheduledChunk,
    limits: BackendLimits,
    segments: SegmentColumns,
    prefixes: list[Prefix],
) -> None:
    """Add the segments of a chunk: the query's, the items' below it, the long item's."""
    job = chunk.job
    plan = job.plan
    request = plan.request
    start, stop = chunk.query
    pages = _allocated(job.query_pages)
    prefix = len(prefixes)
    query_segment = -1
    if chunk.items or stop > start:
        prefixes.append(Prefix(start, pages, job.state_after(start)))
    if stop > start:
        tokens = plan.query_ids[start:stop]
        labels = NO_TOKENS
        is_only = chunk.items and len(plan.item_ids) == 1 and plan.reads is None
        is_whole = is_only and not limits.deterministic_chunk  # the query's end and the only item
        if is_whole:
            tokens = np.concatenate((tokens, plan.item_ids[0]))
            labels = plan.label_ids[0]
        segment = Segment(
            tokens,
            start,
            prefix,
            slots=page_slots(pages, start, stop, limits.page_size),
            label_ids=labels,
            need_lse=request.need_lse,
            rows=request.query_part(start, stop) or None,
            states=job.kept_states(start, stop, limits.page_size),
        )
        query_segment = segments.add(segment)
        if is_whole:
            return
    _add_items(chunk, prefix, query_segment, segments)
    if chunk.long is not None:
        _add_long_chunk(job, chunk.long, chunk.long_ends, limits, segments, prefixes)


def _add_items(
    chunk: ScheduledChunk, prefix: int, query_segment: int, segments: SegmentColumns
) -> None:
    """Add the chunk's items, each below its parent or the query's segment."""
    plan = chunk.job.plan
    request = plan.request
    segment_of: dict[int, int] = {}  # by item
    groups: Iterable[tuple[int, Iterable[int]]] = [(-1, chunk.items)]
    if plan.parents is not None:  # neighbours with the same parent have no descendants between them
        groups = groupby(chunk.items, plan.parents.__getitem__)
    for parent_item, group in groups:
        items = [*group]
        if parent_item < 0:
            parent = query_segment
            start = chunk.job.query_length
        else:
            parent = segment_of[parent_item]
            start = segments.start[parent] + len(segments.token_ids[parent])
        first = segments.add_like(
            Segment(NO_TOKENS, start, prefix, parent, need_lse=request.need_lse),
            [plan.item_ids[item] for item in items],
            [plan.label_ids[item] for item in items],
            None if plan.reads is None else [plan.reads[item] for item in items],
        )
        if plan.parents is not None:
            segment_of.update(zip(items, count(first)))


def _add_long_chunk(
    job: Job,
    chunk: LongChunk,
    is_last: bool,
    limits: BackendLimits,
    segments: SegmentColumns,
    prefixes: list[Prefix],
) -> None:
    """Add a chunk of an item that is longer than a batch.

    Its prompt shares the query's pages up to `shared_query_tokens` and computes the rest of the
    query again, because two sequences cannot continue the same half-filled page. The rest of the
    query and the item are separate segments, so that the item starts a segment as a short item
    does.
    """
    item, start, stop = chunk
    plan = job.plan
    request = plan.request
    page_size = limits.page_size
    query_length = job.query_length
    shared_pages = _allocated(job.query_pages)[: job.shared_length // page_size]
    pages = np.concatenate((shared_pages, _allocated(job.item_pages)))
    prefixes.append(Prefix(start, pages, _state_before(job, start)))

    first = max(start, query_length)  # of the item's tokens
    part = slice(first - query_length, max(0, stop - query_length))
    own = Segment(
        plan.item_ids[item][part],
        first,
        len(prefixes) - 1,
        label_ids=plan.label_ids[item] if is_last else NO_TOKENS,
        need_lse=request.need_lse,
        rows=None if plan.reads is None else plan.reads[item].part(part.start, part.stop),
    )
    rest = Segment(plan.query_ids[start:stop], start, len(prefixes) - 1)
    parent = -1
    for segment in (rest, own):
        last = segment.start + len(segment.token_ids)
        if last == segment.start:
            continue
        states: Sequence[tuple[int, int]] = ()
        if job.states is not None and last == stop and not is_last:
            states = [(len(segment.token_ids), job.states.item)]
        added = replace(
            segment,
            parent=parent,
            slots=None if is_last else page_slots(pages, segment.start, last, page_size),
            states=states,
        )
        parent = segments.add(added)


def _state_before(job: Job, start: int) -> int:
    """Return the slot of the state before token `start` of a long item's prompt; -1 = none."""
    if job.states is None or start == 0:
        return -1
    if start > job.shared_length:
        return job.states.item
    return job.states.cached if start == job.cached_tokens else job.states.kept[start]


def shared_query_tokens(query_length: int, limits: BackendLimits) -> int:
    """Return how many query tokens a long item reads from the query's pages.

    They are whole pages and whole chunks. The item computes the query's other tokens again.
    """
    whole = max(limits.page_size, limits.deterministic_chunk)
    return query_length // whole * whole


def _allocated(pages: Int32Array | None) -> Int32Array:
    assert pages is not None  # noqa: S101  (a job gets its pages before it is scheduled)
    return pages
