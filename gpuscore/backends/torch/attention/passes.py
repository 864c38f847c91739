"""The index tensors that attention in torch's own operators takes: passes over a batch's rows."""

from dataclasses import dataclass

from torch import Tensor

from gpuscore.backends.torch.indices import Rows

# With tiling, the numbers of rows and keys of a call are multiples of this. torch's CPU operator
# puts the work spaces of its threads end to end, and MKL's products round differently at other
# alignments, so a row's bits would otherwise depend on the thread that computes it.
ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Tiling:
    """Fixed numbers of rows; every segment starts at a multiple of `block` in its sequence."""

    block: int  # rows that attend to each other in one causal pass; keys before them are shared
    rows: int  # rows of one call of a dense pass
    group: int  # approximate rows of one call of a causal pass, over several blocks


@dataclass(frozen=True, slots=True)
class DenseCall:
    """Query rows of one call; with tiling, the rows after `count` repeat the last one."""

    rows: Rows
    count: int
    first_key: Tensor | None  # [rows] first visible key among the shared ones; None = all visible


@dataclass(frozen=True, slots=True)
class DensePass:
    """Query rows that share the same keys: cached slots, then rows of this batch.

    The first pass of a row has its request's prefix and its root; each ancestor below the root has
    a pass of its own.
    """

    calls: tuple[DenseCall, ...]
    slots: Tensor  # [P]; without those outside of every row's window
    run: slice | None  # the slots, if they are consecutive and may be read in place
    before: tuple[slice, ...]  # rows of an ancestor, and of earlier blocks of the same segment


@dataclass(frozen=True, slots=True)
class CausalGroup:
    """Whole blocks of similar length, computed in one call.

    Shorter blocks are padded by repeating their own last row, which no earlier row sees. In the
    last layer, query rows are numbered by their place among the scored ones; a row that is not
    scored has a stand-in, which is computed and dropped. Consecutive rows are slices, which are
    read and written in place.
    """

    length: int  # rows of a block
    gather: Rows  # [n, length], or a slice of n * length: rows of the batch
    queries: Rows  # their query rows, in the same form
    keep: Tensor | None  # places in the flattened [n * length] whose results are kept; None = all
    rows: Rows  # query rows of those results
    first_key: Tensor | None  # [length]; None = no window


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """Single scored rows with the visible part of their own block.

    With tiling, the rows after `count` repeat the last one, and each row is computed `times` times.
    """

    rows: Tensor  # [n] places among the scored rows
    count: int
    times: int
    gather: Tensor  # [n, length] rows of the batch
    key_mask: Tensor  # bool [n, length]


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Index tensors of one batch; `scored` parts serve the last layer."""

    dense: tuple[DensePass, ...]
    causal: tuple[CausalGroup, ...]
    scored_dense: tuple[DensePass, ...]
    scored_causal: tuple[CausalGroup, ...]  # blocks with several scored rows
    scored: tuple[ScoredGroup, ...]  # the others
