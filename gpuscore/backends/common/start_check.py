"""One check at start: the chosen kernels score known requests as the plain reference does.

Kernels of libraries and compilers differ between versions and devices. A wrong mask or a misread
stride would change scores without an error. The requests are random tokens; every row is scored.
The reference computes all of them in one batch, with masked attention and the same weights. The
chosen kernels must also agree in other batches: a query in two chunks, items whose query is cached,
one item without the others.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from gpuscore.errors import ConfigError
from gpuscore.types.batch import (
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
    """A request: the length of each segment, and the index of its parent; -1 = no parent."""

    lengths: Sequence[int]
    parents: Sequence[int]


# In the first, a query has items, and one item has a label of 3 tokens. In the second, the query is
# computed before its items, in two chunks; the first chunk has CHUNK tokens.
TREES = (
    Tree((37, 1, 9, 33, 70, 20, 3), (-1, 0, 0, 0, 0, 0, 5)),
    Tree((150, 1, 30, 16), (-1, 0, 0, 0)),
)
CHUNK = 93
ALONE = 2  # the segment of the item that is scored alone: the label head has a kernel for few rows
# FlashInfer skips tiles of keys that no item can see. On Hopper its tiles have up to 192 rows and
# 96 keys, so it skips some for these items without a query.
WITHOUT_QUERY = Tree((60,) * 6, (-1,) * 6)

ABSOLUTE = 1e-4  # error that is always allowed, in standard deviations of the labels' logits
IN_EIGHT_BITS = 5e-2  # the same for kernels that round activations to eight bits
LEAST_SPREAD = 1e-2  # lower bound of that standard deviation, as a fraction of the largest score
FACTOR = 3.0  # in half precision, this multiple of the reference's rounding error is added
# This fraction of the rows must agree. In the others, rounding may choose different experts, or
# different integers for activations.
MOST_ROWS = 0.8


class Piece(NamedTuple):
    """Tokens `start` to `stop` of a known segment, in a batch."""

    tree: int
    segment: int  # its index in the tree
    start: int
    stop: int
    scored: bool = True


class KnownRequests:
    """Known requests, and their batches.

    Args:
        vocab: number of valid token ids.
        labels: number of valid label ids.
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
        # Pages are not in the order of tokens, so that a kernel which ignores the page table fails.
        self.pages = np.arange(pages_for(page_size, trees), dtype=np.int32)[::-1].copy()
        self.all_pieces = [
            self._whole(t, s) for t, tree in enumerate(trees) for s in range(len(tree.lengths))
        ]

    def batches(self) -> Iterator[tuple[str, list[Piece], PackedBatch]]:
        """Yield each batch with its description and pieces, in the order in which to run them."""
        query = self.trees[1].lengths[0]
        others = [piece for piece in self.all_pieces if piece.tree != 1]
        items = [piece for piece in self.all_pieces if piece.tree == 1 and piece.segment]
        alone = [self._whole(0, 0)._replace(scored=False), self._whole(0, ALONE)]
        for description, pieces, cached, num_top in (
            ("packed together", self.all_pieces, 0, self._top),
            ("the first chunk of a query", [Piece(1, 0, 0, CHUNK)], 0, 0),
            ("the second chunk of a query", [Piece(1, 0, CHUNK, query)], CHUNK, 0),
            ("items of a cached query", others + items, query, 1),
            ("an item alone with its query", alone, 0, self._top),
        ):
            yield description, pieces, self._batch(pieces, cached, num_top)

    def packed(self) -> PackedBatch:
        """Return the batch of all segments."""
        return self._batch(self.all_pieces, 0, self._top)

    def _batch(self, pieces: Sequence[Piece], cached: int, num_top: int) -> PackedBatch:
        """Return a batch of pieces; the second request has `cached` cached tokens."""
        segments: list[Segment] = []
        index_of: dict[tuple[int, int], int] = {}
        for tree, segment, start, stop, scored in pieces:
            parent = self.trees[tree].parents[segment]
            position = self._position(tree, segment) + start
            is_cached = tree == 1 and len(pieces) == 1
            first = self._ends[tree][segment]
            segments.append(
                Segment(
                    self._ids[tree][first + start : first + stop],
                    position,
                    tree,
                    index_of.get((tree, parent), -1),
                    slots=page_slots(self.pages, start, stop, self._page_size)
                    if is_cached
                    else None,
                    rows=Rows.every(self._labels[tree][first + start : first + stop])
                    if scored
                    else None,
                    need_lse=True,
                    states=((stop - start, 0),) if is_cached else (),
                )
            )
            index_of[tree, segment] = len(segments) - 1
        prefixes = [Prefix(0, self.pages[:0]) for _ in self.trees]
        if cached:
            prefixes[1] = Prefix(cached, self.pages, 0)
        return pack(segments, prefixes, num_top=num_top)

    def rows(self, pieces: Sequence[Piece]) -> Int32Array:
        """Return the indices in `packed` of the scored rows of `pieces`."""
        scored = [piece for piece in pieces if piece.scored]
        firsts = [self._first_rows[p.tree] + self._ends[p.tree][p.segment] for p in scored]
        ranges = [f + np.arange(p.start, p.stop) for f, p in zip(firsts, scored, strict=True)]
        return np.concatenate(ranges)

    def _whole(self, tree: int, segment: int) -> Piece:
        return Piece(tree, segment, 0, self.trees[tree].lengths[segment])

    def _position(self, tree: int, segment: int) -> int:
        """Return the position of a segment's first token."""
        parent = self.trees[tree].parents[segment]
        if parent < 0:
            return 0
        return self._position(tree, parent) + self.trees[tree].lengths[parent]


def pages_for(page_size: int, trees: Sequence[Tree] = TREES) -> int:
    """Return the number of pages that the cached query takes."""
    return -(-trees[1].lengths[0] // page_size)


class Reference(NamedTuple):
    """The reference, and how much the chosen kernels may differ from it.

    Attributes:
        exact: runs a batch in float32.
        rounded: runs it in the model's half precision; None = the model is float32.
        absolute: see `ABSOLUTE`.
        row_fraction: the fraction of rows that must agree.
    """

    exact: Run
    rounded: Run | None
    absolute: float = ABSOLUTE
    row_fraction: float = 1.0


def check_start(choice: str, known: KnownRequests, chosen: Run, reference: Reference) -> None:
    """Raise ConfigError if the chosen kernels' scores are too far from the reference's.

    Args:
        choice: the flag and its value, for the error.
        known: the requests.
        chosen: runs a batch with the chosen kernels.
    """
    # The chosen kernels run first: memory that the reference freed could hold right results, so a
    # kernel that writes nothing would pass.
    results = [
        (description, known.rows(pieces), _numbers(chosen(batch)))
        for description, pieces, batch in known.batches()
    ]
    packed = known.packed()
    expected = _numbers(reference.exact(packed))
    rounding = np.zeros(len(expected))
    if reference.rounded is not None:
        rounding = _errors(_numbers(reference.rounded(packed)), expected)
    # Rows that overflow in the reference are not compared: `check_collapse` reports overflow.
    judged = np.isfinite(rounding) & np.isfinite(expected).all(axis=1)
    if not judged.any():
        logger.warning("the kernels cannot be checked: all scores of the known requests overflow")
        return
    finite = expected[judged]
    spread = max(float(finite[:, 0].std()), LEAST_SPREAD * float(np.abs(finite).max()))
    allowed = reference.absolute * spread + FACTOR * float(
        np.quantile(rounding[judged], reference.row_fraction)
    )
    for description, rows, numbers in results:
        errors = _errors(numbers, expected[rows])[judged[rows]]
        error = float(np.quantile(errors, reference.row_fraction)) if len(errors) else 0.0
        if not error <= allowed:
            raise ConfigError(
                f"{choice} differs from the reference on this machine: scores of known requests "
                f"({description}) differ by up to {error:.1e} nats (allowed: {allowed:.1e}); "
                f"choose another {choice.split()[0]}"
            )


def _numbers(scores: RowScores) -> Float64Array:
    """Return for each row its label's logit, log-sum-exp and largest logits, if computed."""
    columns = [scores.label_logits, scores.lse, scores.top_logits]
    return np.column_stack([column for column in columns if column is not None]).astype(float)


def _errors(got: Float64Array, expected: Float64Array) -> Float64Array:
    """Return each row's largest error."""
    with np.errstate(invalid="ignore"):
        errors: Float64Array = np.abs(got - expected[:, : got.shape[1]]).max(axis=1)
    return errors
