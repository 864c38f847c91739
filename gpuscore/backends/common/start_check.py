"""One check at start: the chosen kernels score known requests as the plain reference does.

Kernels of libraries and compilers differ between versions and devices. A wrong mask or a misread
stride would change scores without an error. The requests are random tokens; every row is scored.
The reference computes all of them in one batch, by a mask, with the same weights. The chosen
kernels have to agree in other batches, too: a query in two chunks, its items on the cached query,
one item without the others.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from gpuscore.errors import ConfigError
from gpuscore.types.batch import (
    NO_TOKENS,
    Float64Array,
    Int32Array,
    PackedBatch,
    Prefix,
    Rows,
    RowScores,
    Segment,
    pack,
    page_slots,
)
from gpuscore.types.request import MAX_TOP

logger = logging.getLogger(__name__)

Run: TypeAlias = Callable[[PackedBatch], RowScores]


class Tree(NamedTuple):
    """The segments of a request: their lengths, and the segment that each continues, -1 = none."""

    lengths: Sequence[int]
    parents: Sequence[int]


# A query with items, one of which a label of 3 tokens continues; and a query that is computed in
# two chunks, cut at CHUNK, before its items.
TREES = (
    Tree((37, 1, 9, 33, 70, 20, 3), (-1, 0, 0, 0, 0, 0, 5)),
    Tree((150, 1, 30, 16), (-1, 0, 0, 0)),
)
CHUNK = 93
ALONE = 2  # few rows have another kernel for the label head
# FlashInfer skips tiles of keys that items cannot reach: so many items without a query that its
# tiles, on Hopper of up to 192 rows and 96 keys, have some to skip.
WITHOUT_QUERY = Tree((60,) * 6, (-1,) * 6)

ABSOLUTE = 1e-4  # error that is always allowed, in standard deviations of the labels' logits
IN_EIGHT_BITS = 5e-2  # the same, where rows of activations are rounded to eight bits
LEAST_SPREAD = 1e-2  # of the largest number, where all scores are the same
FACTOR = 3.0  # of the reference's own error, in half precision
# The fraction of rows that counts where rounding decides about the experts of a row, or a number
# next to the middle of two integers may become either.
MOST_ROWS = 0.8


class Piece(NamedTuple):
    """Rows of a known segment in a batch."""

    tree: int
    place: int  # of the segment in its tree
    start: int
    stop: int
    scored: bool = True


class KnownRequests:
    """Known requests, and their batches.

    Args:
        vocab, labels: numbers of valid ids.
        page_size: tokens of a page.
        trees: the requests.
    """

    def __init__(
        self, vocab: int, labels: int, page_size: int, trees: Sequence[Tree] = TREES
    ) -> None:
        rng = np.random.default_rng(0)
        self.trees = trees
        self._page_size = page_size
        sizes = [sum(tree.lengths) for tree in trees]
        self._ids = [rng.integers(0, vocab, size).astype(np.int32) for size in sizes]
        self._labels = [rng.integers(0, labels, size).astype(np.int32) for size in sizes]
        self._ends = [np.cumsum([0, *tree.lengths]) for tree in trees]
        self._first_rows = np.cumsum([0, *sizes])
        self._top = min(MAX_TOP, labels)
        # In another order than the tokens, so that no page may take another's place.
        self.pages = np.arange(pages_for(page_size, trees), dtype=np.int32)[::-1].copy()
        self.every = [
            self._whole(t, p) for t, tree in enumerate(trees) for p in range(len(tree.lengths))
        ]

    def batches(self) -> Iterator[tuple[str, list[Piece], PackedBatch]]:
        """Yield what each batch holds, its pieces, and the batch, in the order to run them."""
        query = self.trees[1].lengths[0]
        fresh = [piece for piece in self.every if piece.tree != 1]
        behind = [piece for piece in self.every if piece.tree == 1 and piece.place]
        alone = [self._whole(0, 0)._replace(scored=False), self._whole(0, ALONE)]
        for what, pieces, cached, num_top in (
            ("packed together", self.every, 0, self._top),
            ("the first chunk of a query", [Piece(1, 0, 0, CHUNK)], 0, 0),
            ("the second chunk of a query", [Piece(1, 0, CHUNK, query)], CHUNK, 0),
            ("behind a cached query", fresh + behind, query, 1),
            ("an item alone with its query", alone, 0, self._top),
        ):
            yield what, pieces, self._batch(pieces, cached, num_top)

    def packed(self) -> PackedBatch:
        """Return the batch of all segments."""
        return self._batch(self.every, 0, self._top)

    def _batch(self, pieces: Sequence[Piece], cached: int, num_top: int) -> PackedBatch:
        """Return a batch, in which the second request has so many cached tokens."""
        segments: list[Segment] = []
        place_of: dict[tuple[int, int], int] = {}
        for tree, place, start, stop, scored in pieces:
            parent = self.trees[tree].parents[place]
            first = self._position(tree, place) + start
            kept = tree == 1 and len(pieces) == 1
            end = self._ends[tree][place]
            segments.append(
                Segment(
                    self._ids[tree][end + start : end + stop],
                    first,
                    tree,
                    place_of.get((tree, parent), -1),
                    slots=page_slots(self.pages, start, stop, self._page_size) if kept else None,
                    label_ids=self._labels[tree][end + start : end + stop] if scored else NO_TOKENS,
                    rows=Rows.every(stop - start) if scored else None,
                    need_lse=True,
                    states=((stop - start, 0),) if kept else (),
                )
            )
            place_of[tree, place] = len(segments) - 1
        prefixes = [Prefix(0, self.pages[:0]) for _ in self.trees]
        if cached:
            prefixes[1] = Prefix(cached, self.pages, 0)
        return pack(segments, prefixes, num_top=num_top)

    def rows(self, pieces: Sequence[Piece]) -> Int32Array:
        """Return the numbers of pieces' scored rows in the batch of all."""
        scored = [piece for piece in pieces if piece.scored]
        firsts = [self._first_rows[p.tree] + self._ends[p.tree][p.place] for p in scored]
        ranges = [f + np.arange(p.start, p.stop) for f, p in zip(firsts, scored, strict=True)]
        return np.concatenate(ranges)

    def _whole(self, tree: int, place: int) -> Piece:
        return Piece(tree, place, 0, self.trees[tree].lengths[place])

    def _position(self, tree: int, place: int) -> int:
        """Return the position of a segment's first token."""
        parent = self.trees[tree].parents[place]
        if parent < 0:
            return 0
        return self._position(tree, parent) + self.trees[tree].lengths[parent]


def pages_for(page_size: int, trees: Sequence[Tree] = TREES) -> int:
    """Return the number of pages that the cached query takes."""
    return -(-trees[1].lengths[0] // page_size)


class Reference(NamedTuple):
    """The reference, and how far from it chosen kernels may be.

    Attributes:
        exact: runs a batch in float32.
        rounded: runs it in the model's half precision; None = it is float32.
        absolute: error that is always allowed.
        row_fraction: the fraction of rows that have to agree.
    """

    exact: Run
    rounded: Run | None
    absolute: float = ABSOLUTE
    row_fraction: float = 1.0


def check_start(choice: str, known: KnownRequests, chosen: Run, reference: Reference) -> None:
    """Raise ConfigError if the chosen kernels' scores are too far from the reference's.

    Args:
        choice: names the chosen kernels, for the error.
        known: the requests.
        chosen: runs a batch with the chosen kernels; first, so that no memory holds right answers.
    """
    rounded = reference.rounded
    got = [
        (what, known.rows(pieces), _numbers(chosen(batch)))
        for what, pieces, batch in known.batches()
    ]
    every = known.packed()
    expected = _numbers(reference.exact(every))
    rounding = np.zeros(len(expected))
    if rounded is not None:
        rounding = _errors(_numbers(rounded(every)), expected)
    # Others overflow, in this number format or in any; what that means `check_collapse` says.
    judged = np.isfinite(rounding) & np.isfinite(expected).all(axis=1)
    if not judged.any():
        logger.warning("the start cannot be checked: all scores of known requests overflow")
        return
    finite = expected[judged]
    spread = max(float(finite[:, 0].std()), LEAST_SPREAD * float(np.abs(finite).max()))
    allowed = reference.absolute * spread + FACTOR * float(
        np.quantile(rounding[judged], reference.row_fraction)
    )
    for what, rows, numbers in got:
        errors = _errors(numbers, expected[rows])[judged[rows]]
        error = float(np.quantile(errors, reference.row_fraction)) if len(errors) else 0.0
        if not error <= allowed:
            raise ConfigError(
                f"{choice} computes something else than the reference on this machine: scores of "
                f"known requests, {what}, differ by up to {error:.1e} nats, allowed {allowed:.1e}; "
                f"choose another {choice.split()[0]}"
            )


def _numbers(scores: RowScores) -> Float64Array:
    """Return each row's label's logit, log-sum-exp, and largest logits, if there are."""
    columns = [scores.label_logits, scores.lse, scores.top_logits]
    return np.column_stack([column for column in columns if column is not None]).astype(float)


def _errors(got: Float64Array, expected: Float64Array) -> Float64Array:
    """Return each row's largest error."""
    with np.errstate(invalid="ignore"):
        errors: Float64Array = np.abs(got - expected[:, : got.shape[1]]).max(axis=1)
    return errors
