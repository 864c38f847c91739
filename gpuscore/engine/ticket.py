"""A request's future and the rows of its answer that have arrived so far."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from gpuscore.arrays import BoolArray, Float32Array, Int32Array
from gpuscore.batch import PackedBatch, RowScores
from gpuscore.engine.jobs import Share
from gpuscore.engine.trees import SharedItems
from gpuscore.label_nodes import added_up
from gpuscore.label_trie import LabelTrie
from gpuscore.request import ScoreRequest, ScoreResult, Timings

Progress = Callable[[int], None]  # called with the number of rows scored so far, of `num_rows`

NOTHING: Float32Array = np.empty(0, dtype=np.float32)


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in the engine: its future, its times, and the rows that have arrived.

    With `trie` some of the request's items are nodes of its labels (`label_nodes`).
    """

    request: ScoreRequest
    future: "Future[ScoreResult]"
    progress: Progress | None
    arrived: float  # seconds, monotonic
    planned: float | None = None
    launched: float | None = None
    shared: SharedItems | None = None  # the tree that is computed in place of the request's items
    trie: LabelTrie | None = None
    computed_tokens: int = 0
    rows_left: int = field(init=False)
    label_logits: list[Float32Array] = field(init=False)
    lse: Float32Array = field(init=False)
    top_ids: Int32Array = field(init=False)
    top_logits: Float32Array = field(init=False)
    positions: "Positions | None" = field(init=False)

    def __post_init__(self) -> None:
        request, count = self.request, self.request.num_rows
        self.rows_left = count
        if request.parents is not None:
            self.rows_left = sum(1 for labels in request.label_ids if len(labels))
        self.label_logits = [NOTHING] * len(request.item_ids)
        self.lse = np.full(count, np.nan, dtype=np.float32)
        self.top_ids = np.full(count, -1, dtype=np.int32)
        self.top_logits = np.full(count, np.nan, dtype=np.float32) if request.need_top else NOTHING
        self.positions = None
        if request.every_position:
            self.label_logits = [np.empty(len(ids), np.float32) for ids in request.label_ids]
            self.positions = Positions(request)

    @property
    def computed(self) -> ScoreRequest:
        """The request in the form in which its items are computed."""
        return self.request if self.shared is None else self.shared.request

    def item_of(self, computed: int) -> int:
        """Return the request's item of an item of `computed`."""
        return computed if self.shared is None else self.shared.origin[computed]

    def callers_item(self, computed: int) -> int:
        """Return the caller's item of an item of `computed`, which may be a node below it."""
        return self.item_of(computed) // self._rows_per_item

    @property
    def done(self) -> int:
        """Number of rows that have arrived; with a trie, of the caller's items."""
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
        if self.positions is not None:
            own = scores.label_logits[bounds[0] : bounds[-1]]
            broken, kept, places = self.positions.take(share, own, fine, self.label_logits)
            self.rows_left -= self.positions.arrived(places)
        else:
            items, kept = [self.item_of(item) for item in share.scored], fine
            self._take_ends(items, scores.label_logits, bounds, fine)
            broken = np.array(share.scored, dtype=np.int32)[~fine].tolist()
            places = np.array(items, dtype=np.int32)[kept]
        if scores.lse is not None:
            self.lse[places] = scores.lse[rows][kept]
        if self.request.need_top and scores.top_ids is not None and scores.top_logits is not None:
            self.top_ids[places] = scores.top_ids[rows][kept]
            self.top_logits[places] = scores.top_logits[rows][kept]
        return broken, len(fine) - int(np.count_nonzero(fine))

    def result(self, done: float) -> ScoreResult:
        """Return the complete answer, with timings up to `done`."""
        request, planned, launched = self.request, self.planned, self.launched
        if request.parents is not None:
            self._clear_unscored()
        assert planned is not None and launched is not None  # noqa: S101, PT018  (it was launched)
        result = ScoreResult(
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
        if self.trie is None:
            return result
        prompts = max(0, self.computed_tokens - self._label_tokens(self.trie))
        return added_up(replace(result, computed_tokens=prompts), self.trie)

    def _label_tokens(self, trie: LabelTrie) -> int:
        """Return the tokens of `computed` that are none of a prompt's: those of nodes.

        With a node that is a whole prompt, the item's tokens stand there again.
        """
        items = sum(map(len, self.request.item_ids[:: trie.num_rows]))
        every = sum(map(len, self.computed.item_ids))
        nodes = len(self.request.item_ids) // trie.num_rows * trie.num_nodes
        return every - min(items, every - nodes)

    def _clear_unscored(self) -> None:
        """Set the rows of items without labels, which nothing has computed, to zero."""
        unscored = [item for item, labels in enumerate(self.request.label_ids) if not len(labels)]
        self.lse[unscored] = 0.0
        if self.request.need_top:
            self.top_logits[unscored], self.top_ids[unscored] = 0.0, 0

    def _take_ends(
        self, items: list[int], logits: Float32Array, cu_labels: Int32Array, fine: BoolArray
    ) -> None:
        """Keep one row per item where `fine`."""
        bounds = cu_labels.tolist()
        for index, (item, kept) in enumerate(zip(items, fine.tolist(), strict=True)):
            if kept:
                # A family that runs again for one of its items repeats the others.
                self.rows_left -= self.label_logits[item] is NOTHING
                self.label_logits[item] = logits[bounds[index] : bounds[index + 1]]

    def _finite(self, scores: RowScores, rows: slice, cu_labels: Int32Array) -> BoolArray:
        """Return bool [rows], True where all requested numbers of a row are finite."""
        finite = np.ones(rows.stop - rows.start, dtype=np.bool_)
        if not len(finite):
            return finite
        fine = np.isfinite(scores.label_logits[cu_labels[0] : cu_labels[-1]])
        if not fine.all():
            finite = np.logical_and.reduceat(fine, cu_labels[:-1] - cu_labels[0])
        if self.request.need_lse:
            finite &= False if scores.lse is None else np.isfinite(scores.lse[rows])
        if self.request.need_top:
            finite &= False if scores.top_logits is None else np.isfinite(scores.top_logits[rows])
        return finite


class Positions:
    """The places of the rows of a request for every position, and which rows have arrived."""

    def __init__(self, request: ScoreRequest) -> None:
        # The first row of each item, then the number of rows.
        self._first = [0, *accumulate(map(len, request.item_ids))]
        self._there = np.zeros(self._first[-1], dtype=np.bool_)

    def take(
        self, share: Share, logits: Float32Array, fine: BoolArray, into: list[Float32Array]
    ) -> tuple[list[int], BoolArray, Int32Array]:
        """Copy the logits of a share's rows, one per row, to the items' places in `into`.

        Returns:
            The items with a row that is not fine, whose rows are left out; True for each row that
            is kept; and the places of the kept rows in the answer.
        """
        broken, stop = [], 0
        kept, places = fine.copy(), np.empty(len(fine), dtype=np.int32)
        for item, first, count in share.positions:
            start, stop = stop, stop + count
            if fine[start:stop].all():
                into[item][first : first + count] = logits[start:stop]
                places[start:stop] = np.arange(count) + (self._first[item] + first)
            else:
                broken.append(item)
                kept[start:stop] = False
        return broken, kept, places[kept]

    def arrived(self, places: Int32Array) -> int:
        """Mark these rows as arrived; return how many are new, as a retried chunk repeats some."""
        new = len(places) - int(np.count_nonzero(self._there[places]))
        self._there[places] = True
        return new
