"""A request in the engine: its future, and the rows of its answer as batches deliver them."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from gpuscore.engine.jobs import ScheduledChunk
from gpuscore.engine.pages import PageRows
from gpuscore.engine.plan import Plan
from gpuscore.errors import GpuscoreError
from gpuscore.types.batch import (
    BoolArray,
    Float32Array,
    Int32Array,
    PackedBatch,
    Rows,
    RowScores,
)
from gpuscore.types.request import LabelTrie, ScoreRequest, ScoreResult, Timings

Places = NDArray[np.integer]  # indices, mostly of rows of a request's answer
Progress = Callable[[int], None]  # called with the number of rows scored so far, of `num_rows`


def resolve(future: "Future[ScoreResult]", outcome: ScoreResult | GpuscoreError) -> None:
    """Set a request's result or error; do nothing if its future was cancelled."""
    try:
        if isinstance(outcome, GpuscoreError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        pass


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in the engine: its future, its times, and the rows that have arrived."""

    plan: Plan
    future: "Future[ScoreResult]"
    progress: Progress | None
    arrived_at: float  # seconds on the engine's clock
    scheduled_at: float | None = None  # when its first batch was scheduled
    launched_at: float | None = None  # when its first batch was launched
    computed_tokens: int = 0
    rows_left: int = field(init=False)
    logits: Float32Array = field(init=False)  # [labels of all rows]
    lse: Float32Array = field(init=False)  # [rows]
    top_ids: Int32Array = field(init=False)
    top_logits: Float32Array = field(init=False)
    _logits_per_row: int = field(init=False)  # logits in each row; 0 = rows differ
    _starts: Places = field(init=False)  # [rows + 1] where each row's logits begin in `logits`
    _arrived: BoolArray = field(init=False)  # [rows]

    def __post_init__(self) -> None:
        request = self.request
        count = self.plan.num_rows
        self.rows_left = count
        self._arrived = np.zeros(count, np.bool_)
        counts = _labels_of_rows(request)
        self._logits_per_row = counts[0] if len(set(counts)) == 1 else 0
        self._starts = np.arange(count + 1) * self._logits_per_row
        if not self._logits_per_row:
            self._starts = np.append(0, np.cumsum(counts))
        self.logits = np.empty(self._starts[-1], np.float32)
        self.lse = np.empty(count, dtype=np.float32)
        self.lse.fill(np.nan)  # np.full and np.ones take several times as long
        self.top_ids = np.empty((count, request.num_top), np.int32)
        self.top_logits = np.empty((count, request.num_top), np.float32)

    @property
    def request(self) -> ScoreRequest:
        return self.plan.request

    def query_rows(self, start: int, stop: int) -> PageRows | None:
        """Return copies of the results of the query's tokens `start` to `stop` - 1.

        All of them must have arrived. None if none of these tokens is scored.
        """
        request = self.request
        rows = request.query_part(start, stop)
        if not rows:
            return None
        first = len(request.query_part(0, start).places)
        part = slice(first, first + len(rows.places))
        return PageRows(
            Rows(*(column.copy() for column in rows)),
            RowScores(
                self.logits[self._starts[part.start] : self._starts[part.stop]].copy(),
                lse=self.lse[part].copy() if request.need_lse else None,
                top_ids=self.top_ids[part].copy() if request.num_top else None,
                top_logits=self.top_logits[part].copy() if request.num_top else None,
            ),
        )

    def fill_from_cache(self, pages: list[PageRows | None]) -> None:
        """Fill in the results of the query's first rows, which were cached with their pages."""
        stop = 0
        for page in filter(None, pages):
            places = np.arange(stop, stop := stop + len(page.rows.places))
            self.logits[self._starts[places[0]] : self._starts[stop]] = page.scores.label_logits
            self._store(places, page.scores, slice(None))

    @property
    def rows_done(self) -> int:
        """Number of rows that have arrived, without those of labels' later tokens."""
        return (self.plan.num_rows - self.rows_left) // self.plan.rows_per_token

    def take(
        self, chunk: ScheduledChunk, batch: PackedBatch, first_row: int, scores: RowScores
    ) -> tuple[list[int], int]:
        """Store a chunk's finite rows; its first row is row `first_row` of the batch's scored rows.

        Returns:
            The items of the plan with a non-finite row, of which no row is stored; and the number
            of non-finite rows.
        """
        rows = slice(first_row, first_row + chunk.num_rows)
        bounds = batch.cu_labels[rows.start : rows.stop + 1]
        finite = self._finite(scores, rows, bounds)
        num_nonfinite = len(finite) - int(np.count_nonzero(finite))
        kept, places, nonfinite_items = self._places(chunk, finite)
        if self._logits_per_row:
            logits = scores.label_logits[bounds[0] : bounds[-1]].reshape(-1, self._logits_per_row)
            self.logits.reshape(-1, self._logits_per_row)[places] = logits[kept]
        else:
            counts = np.diff(bounds)[kept]
            logits = scores.label_logits[_runs(bounds[:-1][kept], counts)]
            self.logits[_runs(self._starts[places], counts)] = logits
        self._store(places, scores, rows if isinstance(kept, slice) else first_row + kept)
        return nonfinite_items, num_nonfinite

    def _store(self, places: Places, scores: RowScores, rows: Places | slice) -> None:
        """Store all but the logits of these rows in these places of the answer."""
        self.mark_arrived(places)
        if scores.lse is not None:
            self.lse[places] = scores.lse[rows]
        if self.request.num_top and scores.top_ids is not None and scores.top_logits is not None:
            count = self.request.num_top  # another request of the batch may have more
            self.top_ids[places] = scores.top_ids[rows, :count]
            self.top_logits[places] = scores.top_logits[rows, :count]

    def result(self, done_at: float) -> ScoreResult:
        """Return the complete answer, with timings up to `done_at`."""
        request = self.request
        assert self.scheduled_at is not None  # noqa: S101  (it was launched)
        assert self.launched_at is not None  # noqa: S101
        logits = self.logits
        lse = self.lse
        if request.trie is not None:
            logits, lse = _label_sums(logits, lse, request.trie)
        return ScoreResult(
            label_logits=_split(logits, [*map(len, request.row_labels)]),
            lse=lse if request.need_lse else None,
            top_ids=self.top_ids if request.num_top else None,
            top_logits=self.top_logits if request.num_top else None,
            computed_tokens=max(0, self.computed_tokens - self.plan.label_tokens),
            timings=Timings(
                queue=self.scheduled_at - self.arrived_at,
                batch=self.launched_at - self.scheduled_at,
                device=done_at - self.launched_at,
            ),
        )

    def _places(
        self, chunk: ScheduledChunk, finite: BoolArray
    ) -> tuple[Places | slice, Places, list[int]]:
        """Return the rows of a chunk to keep, the row of the answer that each becomes, and the
        items with a non-finite row, whose rows are not kept.

        A row of the chunk that becomes several rows of the answer is returned once for each.
        """
        if self.plan.rows is None:  # an item is one row of the chunk and one of the answer
            items = np.array(chunk.scored_items, np.int64)
            if np.count_nonzero(finite) == len(finite):
                return slice(None), items, []
            return np.flatnonzero(finite), items[finite], items[~finite].tolist()
        all_finite = bool(finite.all())
        nonfinite_items: list[int] = []
        parts: list[tuple[int, int, int]] = []
        start = 0
        for item, first, count in chunk.spans:
            if all_finite or finite[start : start + count].all():
                parts += [(start, row + first, count) for row in self.plan.rows_of(item)]
            else:
                nonfinite_items.append(item)
            start += count
        kept, places, counts = np.array(parts, np.int64).reshape(-1, 3).T
        return _runs(kept, counts), _runs(places, counts), nonfinite_items

    def mark_arrived(self, places: Places) -> None:
        """Mark these rows as arrived; some may have arrived before, if a batch had to run again."""
        self.rows_left -= len(places) - int(np.count_nonzero(self._arrived[places]))
        self._arrived[places] = True

    def _finite(self, scores: RowScores, rows: slice, cu_labels: Int32Array) -> BoolArray:
        """Return for each row whether all its requested numbers are finite, bool [rows]."""
        logits_finite = np.isfinite(scores.label_logits[cu_labels[0] : cu_labels[-1]])
        if np.count_nonzero(logits_finite) == len(logits_finite):
            finite = np.empty(rows.stop - rows.start, dtype=np.bool_)
            finite.fill(True)
        else:
            finite = np.logical_and.reduceat(logits_finite, cu_labels[:-1] - cu_labels[0])
        if self.request.need_lse:
            finite &= False if scores.lse is None else np.isfinite(scores.lse[rows])
        if self.request.num_top:
            tops = scores.top_logits
            finite &= False if tops is None else np.isfinite(tops[rows]).all(axis=1)
        return finite


def _labels_of_rows(request: ScoreRequest) -> list[int]:
    """Return how many logits each row of the engine's answer has."""
    if request.trie is not None:
        return [*map(len, request.trie.next_ids)] * request.num_rows
    if request.readouts is not None:
        counts: list[int] = np.concatenate(request.readouts.counts).tolist()
        return counts
    return [*map(len, request.label_ids)]


def _runs(starts: Places, counts: Places) -> Places:
    """Return start, start + 1, ... of every run, one after another; `counts` has their lengths."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Places = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return numbers


def _split(logits: Float32Array, lengths: Sequence[int]) -> tuple[Float32Array, ...]:
    """Split logits into parts of these lengths, as views."""
    if len(set(lengths)) == 1:
        return tuple(logits.reshape(len(lengths), -1))
    return tuple(logits[a:b] for a, b in pairwise(accumulate(lengths, initial=0)))


def _label_sums(
    logits: Float32Array, lse: Float32Array, trie: LabelTrie
) -> tuple[Float32Array, Float32Array]:
    """Return the logit of every label, and the log-sum-exp of every item's first row.

    The item's other rows are those of the trie's nodes.
    """
    item_logits = logits.astype(np.float64).reshape(len(lse) // trie.num_rows, -1)
    row_lse = lse.astype(np.float64).reshape(-1, trie.num_rows)
    logit_lse = np.repeat(row_lse, [*map(len, trie.next_ids)], axis=1)
    # By rounding, a logit can exceed the log-sum-exp slightly. A probability is at most 1.
    sums = trie.sums(np.minimum(item_logits - logit_lse, 0.0)) + row_lse[:, :1]
    return sums.astype(np.float32).reshape(-1), lse[:: trie.num_rows]
