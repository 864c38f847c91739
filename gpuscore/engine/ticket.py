"""What has come in of a request's answer."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from gpuscore.engine.jobs import Share
from gpuscore.types import (
    BoolArray,
    Float32Array,
    Int32Array,
    PackedBatch,
    RowScores,
    ScoreRequest,
    ScoreResult,
    Timings,
)

Progress = Callable[[int], None]  # called with the number of rows scored so far, of `num_rows`


@dataclass(slots=True, eq=False)
class Ticket:
    """What the caller of `Engine.score` is waiting for, and what has come in so far."""

    request: ScoreRequest
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
    _there: BoolArray = field(init=False)  # [rows]
    _first: list[int] = field(init=False)  # row of each item

    def __post_init__(self) -> None:
        request, count = self.request, self.request.num_rows
        self.rows_left = count
        self.label_logits = [np.empty(len(ids), np.float32) for ids in request.label_ids]
        self.lse, self.top_logits = (np.full(count, np.nan, dtype=np.float32) for _ in range(2))
        self.top_ids = np.full(count, -1, dtype=np.int32)
        self._there = np.zeros(count, dtype=np.bool_)
        lengths = map(len, request.item_ids) if request.every_position else (1,) * count
        self._first = [0, *accumulate(lengths)][:-1]

    def take(
        self, share: Share, batch: PackedBatch, first_row: int, scores: RowScores
    ) -> tuple[list[int], int]:
        """Keep the rows of a share, those from `first_row` of the batch's scored ones.

        Returns:
            The items of which some row is not finite, which are not kept, and the number of such
            rows.
        """
        items, bounds = share.scored, share.row_bounds
        if not items:
            return [], 0
        rows = slice(first_row, first_row + int(bounds[-1]))
        fine = self._finite(scores, rows, batch.cu_labels[rows.start : rows.stop + 1])
        whole = np.logical_and.reduceat(fine, bounds[:-1])  # [items]
        label_bounds = batch.cu_labels[first_row + bounds].tolist()
        for index, item in enumerate(items):
            if whole[index]:
                start, stop = label_bounds[index], label_bounds[index + 1]
                at = self._chunk_start(share, item)
                self.label_logits[item][at : at + stop - start] = scores.label_logits[start:stop]
        kept = np.repeat(whole, np.diff(bounds))
        places = self._places(share)[kept]
        if scores.lse is not None:
            self.lse[places] = scores.lse[rows][kept]
        if scores.top_ids is not None and scores.top_logits is not None:
            self.top_ids[places] = scores.top_ids[rows][kept]
            self.top_logits[places] = scores.top_logits[rows][kept]
        self.rows_left -= len(places) - int(np.count_nonzero(self._there[places]))
        self._there[places] = True
        broken = [items[index] for index in np.flatnonzero(~whole)]
        return broken, len(fine) - int(np.count_nonzero(fine))

    def result(self, done: float) -> ScoreResult:
        """The answer, at this time; every row is there."""
        request, planned, launched = self.request, self.planned, self.launched
        assert planned is not None and launched is not None  # noqa: S101, PT018  (it has run)
        return ScoreResult(
            label_logits=tuple(self.label_logits),
            lse=self.lse if request.need_lse else None,
            top_ids=self.top_ids if request.need_top else None,
            top_logits=self.top_logits if request.need_top else None,
            computed_tokens=self.computed_tokens,
            timings=Timings(
                queue=planned - self.arrived,
                batch=launched - planned,
                device=done - launched,
            ),
        )

    def _finite(self, scores: RowScores, rows: slice, cu_labels: Int32Array) -> BoolArray:
        """bool [rows]: whether all that was asked of a row is a finite number."""
        fine = np.isfinite(scores.label_logits[cu_labels[0] : cu_labels[-1]])
        finite: BoolArray = np.logical_and.reduceat(fine, cu_labels[:-1] - cu_labels[0])
        if self.request.need_lse:
            finite &= False if scores.lse is None else np.isfinite(scores.lse[rows])
        if self.request.need_top:
            finite &= False if scores.top_logits is None else np.isfinite(scores.top_logits[rows])
        return finite

    def _chunk_start(self, share: Share, item: int) -> int:
        """The item's first label among those that a share has scored."""
        if self.request.every_position and share.long is not None and share.long[0] == item:
            return share.long[1]
        return 0

    def _places(self, share: Share) -> Int32Array:
        """Of each of a share's rows, its row in the answer."""
        if not self.request.every_position:
            return np.array(share.scored, dtype=np.int32)
        lengths = np.diff(share.row_bounds)
        starts = [self._first[item] + self._chunk_start(share, item) for item in share.scored]
        shift = np.array(starts) - share.row_bounds[:-1]
        return (np.arange(lengths.sum()) + np.repeat(shift, lengths)).astype(np.int32)
