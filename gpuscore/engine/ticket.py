"""A request's future, and the rows of its answer that have arrived, each at its place."""

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gpuscore.engine.jobs import Share
from gpuscore.engine.pages import PageRows
from gpuscore.engine.plan import Plan
from gpuscore.errors import GpuscoreError
from gpuscore.types.batch import (
    NO_TOKENS,
    BoolArray,
    Float32Array,
    Int32Array,
    PackedBatch,
    RowScores,
)
from gpuscore.types.request import LabelTrie, ScoreRequest, ScoreResult, Timings

Places = NDArray[np.integer]


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
    """A request in the engine: its future, its times, and the rows that have arrived."""

    plan: Plan
    future: "Future[ScoreResult]"
    progress: Progress | None
    arrived: float  # seconds, monotonic
    planned: float | None = None
    launched: float | None = None
    computed_tokens: int = 0
    rows_left: int = field(init=False)
    label_logits: list[Float32Array] = field(init=False)
    lse: Float32Array = field(init=False)
    top_ids: Int32Array = field(init=False)
    top_logits: Float32Array = field(init=False)
    position_logits: Float32Array = field(init=False)  # [rows] if every position is scored
    _there: BoolArray = field(init=False)  # [rows] that have arrived

    def __post_init__(self) -> None:
        request, count = self.request, self.plan.num_rows
        self.rows_left = count
        self._there = np.zeros(count, np.bool_)
        self.label_logits = [NOTHING] * count
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
    def request(self) -> ScoreRequest:
        return self.plan.request

    def query_rows(self, start: int, stop: int) -> PageRows:
        """Return the results of the query's rows `start` to `stop` - 1, which must have arrived.

        They are copies, which outlive the ticket.
        """
        request, part = self.request, slice(start, stop)
        assert request.query_labels is not None  # noqa: S101  (the query is scored)
        return PageRows(
            request.query_labels[part].copy(),
            self.position_logits[part].copy(),
            lse=self.lse[part].copy() if request.need_lse else None,
            top_ids=self.top_ids[part].copy() if request.num_top else None,
            top_logits=self.top_logits[part].copy() if request.num_top else None,
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
            self.arrive(np.arange(stop))

    @property
    def done(self) -> int:
        """Number of rows that have arrived; with labels of several tokens, of the items."""
        return (self.plan.num_rows - self.rows_left) // self.plan.rows_per_item

    def take(
        self, share: Share, batch: PackedBatch, first_row: int, scores: RowScores
    ) -> tuple[list[int], int]:
        """Keep the finite rows of a share, which starts at `first_row` of the batch's scored rows.

        Returns:
            The items of the plan with a non-finite row, which are not kept, and the number of such
            rows.
        """
        rows = slice(first_row, first_row + share.num_rows)
        bounds = batch.cu_labels[rows.start : rows.stop + 1]
        fine = self._finite(scores, rows, bounds)
        flaws = len(fine) - int(np.count_nonzero(fine))
        kept, places, broken = self._places(share, fine)
        if self.request.every_position:
            self.position_logits[places] = scores.label_logits[bounds[0] : bounds[-1]][kept]
        else:
            made = _rows(scores.label_logits, bounds)
            for row, place in zip(kept.tolist(), places.tolist(), strict=True):
                self.label_logits[place] = made[row]
        self.arrive(places)
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
        assert planned is not None and launched is not None  # noqa: S101, PT018  (it was launched)
        result = ScoreResult(
            label_logits=tuple(self.label_logits),
            lse=self.lse if request.need_lse else None,
            top_ids=self.top_ids if request.num_top else None,
            top_logits=self.top_logits if request.num_top else None,
            computed_tokens=max(0, self.computed_tokens - self.plan.label_tokens),
            timings=Timings(
                queue=planned - self.arrived,
                batch=launched - planned,
                device=done - launched,
            ),
        )
        return result if request.trie is None else _added_up(result, request.trie)

    def _places(self, share: Share, fine: BoolArray) -> tuple[Places, Places, list[int]]:
        """Return the numbers of a share's rows that are kept, each with its answer's row, and the
        items that have a row which is not `fine`.

        A row is there several times if several rows of the answer are equal to it.
        """
        if self.plan.rows is None:  # an item is one row of the share and one of the answer
            items = np.array(share.scored, np.int64)
            return np.flatnonzero(fine), items[fine], items[~fine].tolist()
        if not self.request.every_position:  # an item is one row of the share
            flags = list(zip(share.scored, fine.tolist(), strict=True))
            fit = [
                (number, row)
                for number, (item, good) in enumerate(flags)
                if good
                for row in self.plan.rows[item]
            ]
            numbers, rows = np.array(fit, np.int64).reshape(-1, 2).T
            return numbers, rows, [item for item, good in flags if not good]
        spans = share.spans
        starts = [*accumulate((count for _, _, count in spans), initial=0)]
        broken: list[int] = []
        if not fine.all():
            pairs = zip(spans, pairwise(starts), strict=True)
            broken = [item for (item, *_), own in pairs if not fine[slice(*own)].all()]
        parts = [
            (start, row + first, count)
            for (item, first, count), start in zip(spans, starts, strict=False)
            if item not in broken
            for row in self.plan.rows_of(item)
        ]
        kept, places, counts = np.array(parts, np.int64).reshape(-1, 3).T
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(kept, counts) + within, np.repeat(places, counts) + within, broken

    def arrive(self, places: Places) -> None:
        """Mark these rows as arrived; what runs again repeats some."""
        self.rows_left -= len(places) - int(np.count_nonzero(self._there[places]))
        self._there[places] = True

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


def _added_up(result: ScoreResult, trie: LabelTrie) -> ScoreResult:
    """Return a result of items and nodes as one row per item, with a number per label."""
    assert result.lse is not None  # noqa: S101  (requests with a trie need it)
    count = len(result.label_logits) // trie.num_rows
    logits = np.concatenate(result.label_logits).astype(np.float64).reshape(count, -1)
    lse = result.lse.astype(np.float64).reshape(count, trie.num_rows)
    own = np.repeat(lse, [*map(len, trie.next_ids)], axis=1)
    # Rounding can put a logit a hair above the log-sum-exp; no probability exceeds 1.
    sums = trie.sums(np.minimum(logits - own, 0.0)) + lse[:, :1]
    first = result.lse[:: trie.num_rows]
    return replace(result, label_logits=tuple(sums.astype(np.float32)), lse=first)
