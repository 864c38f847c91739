"""A request's future, and the rows of its answer that have arrived, each at its place."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from itertools import accumulate, compress, pairwise

import numpy as np
from numpy.typing import NDArray

from gpuscore.engine.jobs import QUERY, Share
from gpuscore.engine.pages import PageRows
from gpuscore.engine.trees import DistinctItems, SharedItems
from gpuscore.errors import GpuscoreError
from gpuscore.types.batch import (
    NO_TOKENS,
    BoolArray,
    Float32Array,
    Int32Array,
    PackedBatch,
    RowScores,
)
from gpuscore.types.labels import added_up
from gpuscore.types.request import LabelTrie, ScoreRequest, ScoreResult, Timings

Places = NDArray[np.integer]


class Positions:
    """The places of the rows of a request for every position, and which rows have arrived.

    The rows of a beginning that several items share are computed once, and belong to all of them.

    Args:
        request: the request as the caller made it.
        computed: the form in which the request is computed.
        origin: of each item of `computed`: the item of `request`, -1 = a shared beginning; None if
            both have the same items.
    """

    def __init__(
        self, request: ScoreRequest, computed: ScoreRequest, origin: Sequence[int] | None
    ) -> None:
        # The first row of the query, if it is scored, and of each item; then the number of rows.
        firsts = [0, *accumulate(map(len, request.row_labels))]
        self._there = np.zeros(firsts[-1], dtype=np.bool_)
        first_item = 0 if request.query_labels is None else 1
        count = len(computed.item_ids)
        parents = [-1] * count if computed.parents is None else computed.parents.tolist()
        depths: list[int] = []  # tokens between the query and the item
        for parent in parents:
            above = depths[parent] + len(computed.item_ids[parent]) if parent >= 0 else 0
            depths.append(above)
        items = [[item] for item in (range(count) if origin is None else origin)]
        for item in reversed(range(count)):  # descendants before ancestors
            items[item] = [copy for copy in items[item] if copy >= 0]
            if parents[item] >= 0:
                items[parents[item]] += items[item]
        # Of each item of `computed`: the rows of the answer where its first row belongs.
        self._starts = {
            item: np.array([firsts[first_item + copy] + depths[item] for copy in items[item]])
            for item in range(count)
        }
        self._starts[QUERY] = np.zeros(1, np.int64)

    def of(self, share: Share, fine: BoolArray) -> tuple[list[int], Places, Places]:
        """Find the places of a share's rows.

        Args:
            fine: bool [rows of the share], False where a number is not finite.

        Returns:
            The items of `computed` (or QUERY) with a row that is not fine, whose rows are left out;
            and the numbers of the other rows within the share, each with a place in the answer.
        """
        broken: list[int] = []
        kept, places = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        stop = 0
        for item, first, count in share.positions:
            start, stop = stop, stop + count
            if not fine[start:stop].all():
                broken.append(item)
                continue
            rows, starts = np.arange(count), self._starts[item]
            kept.append(np.tile(rows + start, len(starts)))
            places.append((starts[:, None] + (first + rows)).reshape(-1))
        return broken, np.concatenate(kept), np.concatenate(places)

    def arrived(self, places: Places) -> int:
        """Mark these rows as arrived; return how many are new, as a retried chunk repeats some."""
        new = len(places) - int(np.count_nonzero(self._there[places]))
        self._there[places] = True
        return new


def resolve(future: "Future[ScoreResult]", outcome: ScoreResult | GpuscoreError) -> None:
    """Set a request's result or error, unless its future was cancelled meanwhile."""
    try:
        if isinstance(outcome, GpuscoreError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        pass


Progress = Callable[[int], None]  # called with the number of rows scored so far, of `num_rows`

NOTHING: Float32Array = np.empty(0, dtype=np.float32)


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in the engine: its future, its times, and the rows that have arrived.

    With `trie` some of the request's items are nodes of its labels (`label_nodes`). With `distinct`
    the caller's request has items that are equal, and `request` the first of each.
    """

    request: ScoreRequest
    future: "Future[ScoreResult]"
    progress: Progress | None
    arrived: float  # seconds, monotonic
    planned: float | None = None
    launched: float | None = None
    shared: SharedItems | None = None  # the tree that is computed in place of the request's items
    trie: LabelTrie | None = None
    distinct: DistinctItems | None = None
    computed_tokens: int = 0
    rows_left: int = field(init=False)
    label_logits: list[Float32Array] = field(init=False)
    lse: Float32Array = field(init=False)
    top_ids: Int32Array = field(init=False)
    top_logits: Float32Array = field(init=False)
    position_logits: Float32Array = field(init=False)  # [rows] if every position is scored
    _positions: Positions | None = field(init=False, default=None)  # made when first needed

    def __post_init__(self) -> None:
        request, count = self.request, self.request.num_rows
        self.rows_left = count
        if request.parents is not None:
            self.rows_left = sum(1 for labels in request.label_ids if len(labels))
        self.label_logits = [NOTHING] * len(request.item_ids)
        self.lse = np.empty(count, dtype=np.float32)
        self.lse.fill(np.nan)  # np.full and np.ones take several times as long
        self.top_ids, self.top_logits = NO_TOKENS, NOTHING
        if request.num_top:
            self.top_ids = np.full((count, request.num_top), -1, dtype=np.int32)
            self.top_logits = np.full((count, request.num_top), np.nan, dtype=np.float32)
        self.position_logits = NOTHING
        if request.every_position:
            self.position_logits = np.empty(count, np.float32)
            ends = np.cumsum([*map(len, request.row_labels)])
            self.label_logits = np.split(self.position_logits, ends[:-1])

    @property
    def computed(self) -> ScoreRequest:
        """The request as the engine computes it, perhaps with shared beginnings as items."""
        return self.request if self.shared is None else self.shared.request

    @property
    def positions(self) -> Positions:
        """The places of the rows, if every position is scored."""
        if self._positions is None:
            origin = None if self.shared is None else self.shared.origin
            self._positions = Positions(self.request, self.computed, origin)
        return self._positions

    def item_of(self, computed: int) -> int:
        """Return the request's item for an item of `computed`; the first, if several share it."""
        if computed == QUERY:
            return 0
        if self.shared is None:
            return computed
        while self.shared.origin[computed] < 0:  # those that continue a prefix follow it
            computed += 1
        return self.shared.origin[computed]

    def query_rows(self, start: int, stop: int) -> PageRows:
        """Return the results of the query's rows `start` to `stop` - 1, which must have arrived.

        They are copies, which outlive the ticket.
        """
        request, part = self.request, slice(start, stop)
        assert request.query_labels is not None  # noqa: S101  (the query is scored)
        return PageRows(
            request.query_labels[part].copy(),
            self.position_logits[part].copy(),
            self.lse[part].copy() if request.need_lse else None,
            self.top_ids[part].copy() if request.num_top else None,
            self.top_logits[part].copy() if request.num_top else None,
        )

    def take_kept(self, pages: list[PageRows]) -> None:
        """Take the results of the query's first rows, which were kept with their pages."""
        stop = 0
        for page in pages:
            part = slice(stop, stop := stop + len(page.labels))
            self.position_logits[part] = page.logits
            if self.request.need_lse and page.lse is not None:
                self.lse[part] = page.lse
            if self.request.num_top and page.top_ids is not None and page.top_logits is not None:
                count = self.request.num_top
                self.top_ids[part] = page.top_ids[:, :count]
                self.top_logits[part] = page.top_logits[:, :count]
        if stop:
            self.rows_left -= self.positions.arrived(np.arange(stop, dtype=np.int32))

    def callers_item(self, computed: int) -> int:
        """Return the caller's item for an item of `computed`, which may be a node below it."""
        item = self.item_of(computed) // self._rows_per_item
        return item if self.distinct is None else self.distinct.first(item)

    @property
    def done(self) -> int:
        """Number of rows that have arrived; with a trie, of the caller's items.

        Repeated items count as arrived once all distinct items have arrived.
        """
        if self.distinct is not None and self.rows_left == 0:
            return len(self.distinct.places)
        return (self.request.num_rows - self.rows_left) // self._rows_per_item

    @property
    def _rows_per_item(self) -> int:
        return 1 if self.trie is None else self.trie.num_rows

    def take(
        self, share: Share, batch: PackedBatch, first_row: int, scores: RowScores
    ) -> tuple[list[int], int]:
        """Keep the finite rows of a share, which starts at `first_row` of the batch's scored rows.

        Returns:
            The items of `computed` with a non-finite row, which are not kept, and the number of
            such rows.
        """
        rows = slice(first_row, first_row + share.num_rows)
        bounds = batch.cu_labels[rows.start : rows.stop + 1]
        fine = self._finite(scores, rows, bounds)
        flaws = len(fine) - int(np.count_nonzero(fine))
        broken: list[int] = []
        kept: BoolArray | slice | Places = fine if flaws else slice(None)
        if self.request.every_position:
            broken, kept, places = self.positions.of(share, fine)
            self.position_logits[places] = scores.label_logits[bounds[0] : bounds[-1]][kept]
            self.rows_left -= self.positions.arrived(places)
        else:
            if flaws:
                scored = zip(share.scored, fine, strict=True)
                broken = [item for item, good in scored if not good]
            items = share.scored
            if self.shared is not None:
                items = [self.item_of(item) for item in share.scored]
            self._take_ends(items, scores.label_logits, bounds, fine)
            places = np.array(items, dtype=np.int64)[kept]
        if scores.lse is not None:
            self.lse[places] = scores.lse[rows][kept]
        if self.request.num_top and scores.top_ids is not None and scores.top_logits is not None:
            count = self.request.num_top  # another request of the batch may want more
            self.top_ids[places] = scores.top_ids[rows, :count][kept]
            self.top_logits[places] = scores.top_logits[rows, :count][kept]
        return broken, flaws

    def result(self, done: float) -> ScoreResult:
        """Return the complete answer, with timings up to `done`."""
        request, planned, launched = self.request, self.planned, self.launched
        if request.parents is not None:
            self._clear_unscored()
        assert planned is not None and launched is not None  # noqa: S101, PT018  (it was launched)
        result = ScoreResult(
            label_logits=tuple(self.label_logits),
            lse=self.lse if request.need_lse else None,
            top_ids=self.top_ids if request.num_top else None,
            top_logits=self.top_logits if request.num_top else None,
            computed_tokens=max(0, self.computed_tokens - self._label_tokens()),
            timings=Timings(
                queue=planned - self.arrived,
                batch=launched - planned,
                device=done - launched,
            ),
        )
        if self.trie is not None:
            result = added_up(result, self.trie)
        return result if self.distinct is None else self.distinct.spread(result)

    def _label_tokens(self) -> int:
        """Count the tokens of `computed` that belong to nodes of labels, not to a prompt.

        If a node is a whole prompt, the item's tokens stand in `computed` twice.
        """
        nodes = self.request.nodes
        if nodes is None:
            return 0
        prompts = self.request.item_ids
        items = sum(map(len, prompts)) - sum(len(prompts[node]) for node in nodes.tolist())
        every = sum(map(len, self.computed.item_ids))
        return every - min(items, every - len(nodes))

    def _clear_unscored(self) -> None:
        """Set the rows of items without labels, which nothing has computed, to zero."""
        unscored = [item for item, labels in enumerate(self.request.label_ids) if not len(labels)]
        self.lse[unscored] = 0.0
        if self.request.num_top:
            self.top_logits[unscored], self.top_ids[unscored] = 0.0, 0

    def _take_ends(
        self, items: list[int], logits: Float32Array, cu_labels: Int32Array, fine: BoolArray
    ) -> None:
        """Keep one row per item where `fine`."""
        rows, kept = _rows(logits, cu_labels), fine.tolist()
        for item, row in compress(zip(items, rows, strict=True), kept):
            # A family that runs again for one of its items repeats the others.
            self.rows_left -= self.label_logits[item] is NOTHING
            self.label_logits[item] = row

    def _finite(self, scores: RowScores, rows: slice, cu_labels: Int32Array) -> BoolArray:
        """Return bool [rows], True where all requested numbers of a row are finite."""
        fine = np.isfinite(scores.label_logits[cu_labels[0] : cu_labels[-1]])
        if np.count_nonzero(fine) == len(fine):
            finite = np.empty(rows.stop - rows.start, dtype=np.bool_)
            finite.fill(True)
        else:
            finite = np.logical_and.reduceat(fine, cu_labels[:-1] - cu_labels[0])
        if self.request.need_lse:
            finite &= False if scores.lse is None else np.isfinite(scores.lse[rows])
        if self.request.num_top:
            tops = scores.top_logits
            finite &= False if tops is None else np.isfinite(tops[rows]).all(axis=1)
        return finite


def _rows(logits: Float32Array, cu_labels: Int32Array) -> list[Float32Array]:
    """Return the logits of each row, as views."""
    bounds = cu_labels.tolist()
    start, end, count = bounds[0], bounds[-1], len(bounds) - 1
    if count > 1 and bounds == [*range(start, end + 1, max(1, (end - start) // count))]:
        return list(logits[start:end].reshape(count, -1))
    return [logits[start:stop] for start, stop in pairwise(bounds)]
