"""A request in the scheduler (`Job`), and the part of it that one batch computes (`Share`);
`draft_batch` lays the shares of a batch out as segments and their cached prefixes."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby

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
    Rows,
    Segment,
    SegmentColumns,
    pack_columns,
    page_slots,
)
from gpuscore.types.request import ScoreRequest


@dataclass(slots=True, eq=False)
class Job:
    """A request in the scheduler, with the work that no batch has taken yet.

    `short` holds the families that fit a batch, by their first items. `long` holds the items that
    are longer, which run in chunks, one item after the other; they have no descendants.
    """

    plan: Plan
    order: tuple[int, int]  # (priority, arrival)
    short: deque[int] = field(default_factory=deque)
    long: deque[int] = field(default_factory=deque)
    long_done: int = 0  # tokens that batches took of long[0], after `long_rest` query tokens
    retried: set[int] = field(default_factory=set)  # long items or QUERY, with a non-finite row
    query_done: int = 0  # query tokens that are cached or that batches took
    cached: int = 0  # query tokens that were cached
    cached_rows: list[PageRows | None] = field(default_factory=list)  # of their pages
    query_pages: Int32Array | None = None  # None until the job has its pages
    item_pages: Int32Array | None = None  # for long items
    states: JobStates | None = None  # slots of a model with linear layers, from its start on
    keys: tuple[PageKey, ...] | None = None  # of the query's full pages; made when first needed
    lacks: bytes = b""  # digest of the query's first page that was not cached at the last try
    published: int = 0  # number of the query's full pages that other jobs can find
    active: bool = False  # in a ring of the scheduler
    removed: bool = False
    family: dict[int, range] | None = None  # of each first item; None = all items are alone
    tokens: dict[int, int] | list[int] = field(default_factory=list)  # by family's first item
    deficit: int = 0  # tokens that the job may still take in this round, see the scheduler
    running: list["Share"] = field(default_factory=list)  # in batches that are not collected
    epoch: int = 0  # grows when the work of running shares is taken back

    @property
    def request(self) -> ScoreRequest:
        return self.plan.request

    @property
    def cut(self) -> int:
        return len(self.plan.query_ids)

    def divide_items(self, max_tokens: int) -> None:
        """Divide the items into those that fit a batch of `max_tokens` and longer ones."""
        lengths = [*map(len, self.plan.item_ids)]
        self.tokens = lengths
        firsts: Iterable[int] = range(len(lengths))
        if self.plan.parents is not None:
            self.family = {family.start: family for family in self.plan.families()}
            self.tokens = {
                first: sum(lengths[family.start : family.stop])
                for first, family in self.family.items()
            }
            firsts = self.family
        tokens = self.tokens
        self.short.extend([first for first in firsts if tokens[first] <= max_tokens])
        self.long.extend([first for first in firsts if tokens[first] > max_tokens])
        # No plan has larger families.
        assert all(len(self.family_of(first)) == 1 for first in self.long)  # noqa: S101

    def family_of(self, first: int) -> range:
        """Return the items of the family that begins with `first`."""
        return range(first, first + 1) if self.family is None else self.family[first]

    def take_short(self, allowance: int) -> tuple[list[int], int]:
        """Hand out short families, in order, of up to `allowance` tokens together.

        Returns:
            Their items, and the tokens of the allowance that are left.
        """
        short, tokens, items, left = self.short, self.tokens, list[int](), allowance
        while short and tokens[short[0]] <= left:
            first = short.popleft()
            left -= tokens[first]
            if self.family is None:
                items.append(first)
            else:
                items.extend(self.family[first])
        return items, left

    def state_after(self, tokens: int) -> int:
        """Return the slot of the state after the query's first `tokens` tokens, which are done."""
        if self.states is None or tokens == 0:
            return -1
        return self.states.cached if tokens == self.cached else self.states.query

    def kept_states(self, start: int, stop: int, page_size: int) -> list[tuple[int, int]]:
        """Return the states to keep of a chunk, each as (tokens of the chunk up to it, slot)."""
        if self.states is None:
            return []
        first = max(start, self.published * page_size)  # what others may read stays as it is
        kept = [(at - start, slot) for at, slot in self.states.kept.items() if first < at <= stop]
        return [*sorted(kept), (stop - start, self.states.query)]

    @property
    def exhausted(self) -> bool:
        return self.query_done == self.cut and not self.short and not self.long


@dataclass(slots=True, eq=False)
class Share:
    """The part of a job that one batch computes."""

    job: Job
    epoch: int
    query: tuple[int, int]  # (start, stop) in the query; may be empty
    items: list[int] = field(default_factory=list)  # of short families, in order
    long: tuple[int, int, int] | None = None  # (item, start, stop), counted as `long_done`
    rest: int = 0  # query tokens at the start of the long item's chunks
    long_ends: bool = False  # the item's last chunk; only `readouts` score the others
    tokens: int = 0
    alone: bool = False  # a single item that runs again after a non-finite row

    @property
    def firsts(self) -> list[int]:
        """The first items of the share's short families."""
        family = self.job.family
        return self.items if family is None else [item for item in self.items if item in family]

    @property
    def scores_query(self) -> bool:
        """True if a token of the share's query is scored."""
        return self.job.request.reads_query(*self.query)

    @property
    def is_one_prompt(self) -> bool:
        """True if the request's only item may be one segment with the query's end."""
        plan = self.job.plan
        return len(plan.item_ids) == 1 and plan.reads is None

    @property
    def scored(self) -> list[int]:
        """The items whose last token's row is scored, in order."""
        plan = self.job.plan
        items = self.items
        if plan.rows is not None:
            items = [item for item in items if len(plan.label_ids[item])]
        return [*items, self.long[0]] if self.long and self.long_ends else items

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """The scored rows, in order: (item or QUERY, the first one's number in it, their number).

        An item has one row, its last token's, or with `readouts` any number.
        """
        plan, (start, stop) = self.job.plan, self.query
        if plan.reads is None:
            return [(item, 0, 1) for item in self.scored]
        spans: list[tuple[int, int, int]] = []
        if self.scores_query:
            assert plan.request.readouts is not None  # noqa: S101  (they score it)
            of_query = plan.request.readouts.rows[0]
            spans.append((QUERY, of_query.before(start), len(of_query.part(start, stop)[0].places)))
        spans += [(item, 0, len(plan.reads[item].places)) for item in self.items]
        if self.long is not None:
            item, start, stop = self.long
            rows = plan.reads[item]
            first, last = rows.before(start - self.rest), rows.before(stop - self.rest)
            spans.append((item, first, last - first))
        return spans

    @property
    def num_rows(self) -> int:
        """Number of scored rows."""
        if self.job.plan.reads is None:
            return len(self.scored)
        return sum(count for _, _, count in self.spans)

    @property
    def valid(self) -> bool:
        """False once the work was taken back; its results are then ignored."""
        return self.epoch == self.job.epoch

    @property
    def pieces(self) -> int:
        """Number of parts that could run in separate batches."""
        return len(self.firsts) + (self.long is not None) + (self.query[1] > self.query[0])


def is_minimal(shares: Sequence[Share], min_tokens: int) -> bool:
    """True if a batch cannot be made smaller: one family, or at most `min_tokens` tokens."""
    if len(shares) > 1 or shares[0].pieces > 1:
        return False
    return bool(shares[0].items) or shares[0].tokens <= min_tokens


def draft_batch(shares: Sequence[Share], limits: BackendLimits) -> PackedBatch:
    """Return the batch that computes these shares; its scored rows follow their order and that of
    their items."""
    segments = SegmentColumns()
    prefixes: list[Prefix] = []
    for share in shares:
        _add_share(share, limits, segments, prefixes)
    num_top = max(share.job.request.num_top for share in shares)
    return pack_columns(segments, prefixes, num_top=num_top)


def _add_share(
    share: Share, limits: BackendLimits, segments: SegmentColumns, prefixes: list[Prefix]
) -> None:
    job, plan, (start, stop) = share.job, share.job.plan, share.query
    request = plan.request
    pages = _pages(job.query_pages)
    row, parent = len(prefixes), -1
    if share.items or stop > start:
        prefixes.append(Prefix(start, pages, job.state_after(start)))
    if stop > start:
        slots = page_slots(pages, start, stop, limits.page_size)
        states = job.kept_states(start, stop, limits.page_size)
        if share.items and share.is_one_prompt and not limits.deterministic_chunk:
            tokens = np.concatenate((plan.query_ids[start:], plan.item_ids[0]))
            whole = Segment(
                tokens,
                start,
                row,
                slots=slots,
                states=states,
                label_ids=plan.label_ids[0],
                need_lse=request.need_lse,
            )
            segments.add(whole)
            return
        segment = Segment(plan.query_ids[start:stop], start, row, slots=slots, states=states)
        rows, labels = request.query_part(start, stop)
        if len(labels):
            lse = request.need_lse
            segment = replace(segment, label_ids=labels, rows=rows, need_lse=lse)
        parent = segments.add(segment)
    _add_items(share, row, parent, segments)
    if share.long is not None:
        _add_long_chunk(share, limits, segments, prefixes)


def _add_items(share: Share, row: int, query: int, segments: SegmentColumns) -> None:
    """Add the share's items, each below its parent or the query's segment."""
    plan, request, place = share.job.plan, share.job.request, dict[int, int]()
    groups: Iterable[tuple[int, Iterable[int]]] = [(-1, share.items)]
    if plan.parents is not None:  # neighbours with the same parent have no descendants between them
        groups = groupby(share.items, plan.parents.__getitem__)
    for above, group in groups:
        start, parent, items = share.job.cut, query, [*group]
        if above >= 0:
            parent = place[above]
            start = segments.start[parent] + len(segments.token_ids[parent])
        first = segments.add_like(
            Segment(NO_TOKENS, start, row, parent, need_lse=request.need_lse),
            [plan.item_ids[item] for item in items],
            [_some(plan.label_ids[item]) for item in items],
            None if plan.reads is None else [plan.reads[item] for item in items],
        )
        if plan.parents is not None:
            place.update(zip(items, count(first)))


def _some(labels: Int32Array) -> Int32Array | None:
    return labels if len(labels) else None


def _add_long_chunk(
    share: Share, limits: BackendLimits, segments: SegmentColumns, prefixes: list[Prefix]
) -> None:
    """Add a chunk of an item that is longer than a batch.

    The item's sequence shares the query's pages up to `long_base` and computes the rest of the
    query again, because two sequences cannot continue the same half-filled page. The rest and the
    item are separate segments, so that the item starts a segment as a short item does.
    """
    assert share.long is not None  # noqa: S101  (the caller has checked it)
    job, plan, (item, start, stop) = share.job, share.job.plan, share.long
    request = plan.request
    base, page_size = long_base(job.cut, limits), limits.page_size
    rest = long_rest(job.cut, limits)
    pages = np.concatenate((_pages(job.query_pages)[: base // page_size], _pages(job.item_pages)))
    prefixes.append(Prefix(base + start, pages, _state_before(job, base, start)))

    def add(
        tokens: Int32Array,
        first: int,
        parent: int = -1,
        labels: Int32Array | None = None,
        rows: Rows | None = None,
    ) -> None:
        last = first + len(tokens)
        states: Sequence[tuple[int, int]] = ()
        if job.states is not None and last == base + stop and not share.long_ends:
            states = [(len(tokens), job.states.item)]
        segment = Segment(
            tokens,
            first,
            len(prefixes) - 1,
            parent,
            slots=None if share.long_ends else page_slots(pages, first, last, page_size),
            label_ids=labels,
            rows=rows,
            need_lse=request.need_lse and labels is not None,
            states=states,
        )
        segments.add(segment)

    parent = -1
    if start < rest:
        parent = len(segments)
        add(plan.query_ids[base + start : min(base + stop, job.cut)], base + start)
    if stop > rest:
        first, last = max(0, start - rest), stop - rest
        labels, rows = plan.label_ids[item] if share.long_ends else None, None
        if plan.reads is not None:
            rows, own = plan.reads[item].part(first, last)
            labels = _some(plan.label_ids[item][own])
        add(plan.item_ids[item][first:last], job.cut + first, parent, labels, rows=rows)


def _state_before(job: Job, base: int, start: int) -> int:
    """Return the slot of the state before a long item's chunk."""
    if job.states is None or base + start == 0:
        return -1
    if start:
        return job.states.item
    return job.states.cached if base == job.cached else job.states.kept[base]


def long_base(cut: int, limits: BackendLimits) -> int:
    """Number of query tokens whose pages a long item shares: whole pages and whole chunks."""
    whole = max(limits.page_size, limits.deterministic_chunk)
    return cut // whole * whole


def long_rest(cut: int, limits: BackendLimits) -> int:
    """Number of query tokens after `long_base`, which a long item computes again."""
    return cut - long_base(cut, limits)


def _pages(pages: Int32Array | None) -> Int32Array:
    assert pages is not None  # noqa: S101  (a job gets its pages before its first share)
    return pages
