"""The input of a forward pass, `PackedBatch`; `pack`, which builds it; and a backend's limits.

    query of n tokens    items, each at positions n, n + 1, ...
    +----------------+---------+--------+----------+
    | parent segment | item 0  | item 1 | item 2   |      one request, one batch
    +----------------+---------+--------+----------+

A part of the query that ran in an earlier batch is a cached prefix and has no rows here. Segments
form trees of any depth: an item may itself be the parent of segments that continue it.

A model with linear attention has a state after each token, of a fixed size. A segment begins with
its parent's last state, or with the state after its cached prefix. States that later batches need
are kept in slots.

Sizes in shape comments: T tokens, S segments, R requests, N scored rows, L labels in all, P pages,
K states.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32Array: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]
Float32Array: TypeAlias = NDArray[np.float32]
Float64Array: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]

if TYPE_CHECKING:
    Int32Rows: TypeAlias = tuple[Int32Array, ...]
    Float32Rows: TypeAlias = tuple[Float32Array, ...]
else:
    # These types tell the decoder of messages to create all arrays of a tuple at once.
    Int32Rows, Float32Rows = (type(name, (tuple,), {}) for name in ("Int32Rows", "Float32Rows"))

NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    first = int(differ.argmax()) if length else 0  # 0 if none differ
    return first if length and differ[first] else length


def sorted_order(sequences: Sequence[Int32Array]) -> list[int]:
    """Return the indices of token sequences in lexicographic order."""
    # Big-endian bytes of numbers that are not negative sort as the numbers do.
    together = np.concatenate(sequences).astype(">i4").tobytes()
    bounds = accumulate((4 * len(ids) for ids in sequences), initial=0)
    keys = [together[start:stop] for start, stop in pairwise(bounds)]
    return sorted(range(len(sequences)), key=keys.__getitem__)


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """Limits of a backend; the engine plans batches within them."""

    max_tokens: int  # tokens of one batch
    page_size: int  # tokens of one KV page
    num_pages: int  # KV pages
    max_model_len: int  # tokens of one prompt
    vocab_rows: int  # valid token ids of prompts are 0 <= id < vocab_rows
    token_buckets: tuple[int, ...] = ()  # padded batch sizes; empty = ragged
    identity: str = ""  # model, revision and dtype that cached keys and values belong to
    # 0 = a row's bits may depend on its batch. Otherwise they do not, provided that chunks end at
    # multiples of this number and the query segment's length depends on the query alone.
    deterministic_chunk: int = 0
    # The class names of a classification model, whose labels are classes. None = labels are tokens.
    classes: tuple[str, ...] | None = None
    quantized: bool = False  # 8-bit weights: the engine scores known prompts at start
    num_states: int = 0  # slots for states; 0 = the model has none, only keys and values
    gated_product: str = ""  # for logs: whether gate-up products write silu(gate) * up

    @property
    def label_rows(self) -> int:
        """Number of valid label ids: 0 <= id < label_rows."""
        return self.vocab_rows if self.classes is None else len(self.classes)

    @property
    def model(self) -> dict[str, object]:
        """The limits that prompts and scores depend on. They must be equal in all replicas."""
        names = ("identity", "vocab_rows", "classes", "max_model_len", "page_size")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One forward pass over many segments.

    The mask rule: a token sees its request's cached prefix, all tokens of its segment's ancestors,
    and the earlier tokens of its own segment, itself included. It sees nothing else; there is no
    delimiter token. `visible_rows` and `prefix_slots` are that rule as code. In a linear layer
    a token's state depends on the same tokens.

    The segments of a tree are in preorder: a segment's descendants follow it directly. A segment's
    first position is the number of tokens that it sees before its own.
    """

    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T] an item's positions start at the query's length
    cu_seqlens: Int32Array  # [S+1] segment boundaries
    parent: Int32Array  # [S] index of the parent segment, -1 = none
    request_of: Int32Array  # [S] row of prefix_lens and page_table
    prefix_lens: Int32Array  # [R] cached tokens
    page_table: Int32Array  # [R, P] pages of the cached tokens, -1 padded
    slot_mapping: Int32Array  # [T] KV slot to write, -1 = not stored
    score_rows: Int32Array  # [N] rows whose next-token distribution is scored
    cu_labels: Int32Array  # [N+1]
    label_token_ids: Int32Array  # [L]
    need_lse: BoolArray  # [N] rows whose log-sum-exp is needed
    prefix_states: Int32Array  # [R] slot of the state after the cached tokens, -1 = none
    state_rows: Int32Array  # [K] rows whose states are stored, ascending
    state_slots: Int32Array  # [K] slots that these states are stored in
    num_top: int  # most probable tokens that are returned for every scored row

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def label_rows(self) -> Int64Array:
        """The number of the scored row that each label belongs to, [L]."""
        ends = self.cu_labels
        return np.arange(len(self.score_rows)).repeat(ends[1:] - ends[:-1])


def visible_rows(batch: PackedBatch) -> BoolArray:
    """The mask rule within a batch, [T, T]: entry (i, j) is true if row i sees row j.

    Every row also sees the whole cached prefix of its request (`prefix_slots`). In a layer with a
    sliding window, a row sees only keys whose position is above its own minus the window.
    """
    segment = np.repeat(np.arange(len(batch.parent)), np.diff(batch.cu_seqlens))  # [T]
    row = np.arange(len(segment))
    visible: BoolArray = (segment[:, None] == segment) & (row[:, None] >= row)
    ancestor = batch.parent
    while (ancestor >= 0).any():
        visible |= ancestor[segment][:, None] == segment
        ancestor = np.where(ancestor >= 0, batch.parent[ancestor], -1)
    return visible


def lineage(batch: PackedBatch, segment: int) -> list[int]:
    """Return a segment's ancestors, from the root to its parent."""
    ancestors: list[int] = []
    while (segment := int(batch.parent[segment])) >= 0:
        ancestors.append(segment)
    return ancestors[::-1]


@dataclass(frozen=True, slots=True)
class RowScores:
    """A batch's results. All but `label_logits` are None if no row needs them.

    `lse` holds NaN in rows that do not need it.
    """

    label_logits: Float32Array  # [L]
    lse: Float32Array | None  # [N]
    top_ids: Int32Array | None  # [N, num_top] the most probable, lower ids first on a tie
    top_logits: Float32Array | None  # [N, num_top] the logits of `top_ids`


@dataclass(frozen=True, slots=True)
class Prefix:
    """A request's cached prefix: its first `length` tokens, with keys and values in `pages`."""

    length: int
    pages: Int32Array
    state: int = -1  # slot of the state after them; -1 = there is none


class Rows(NamedTuple):
    """The scored tokens of a sequence, with their labels; false if no token is scored."""

    places: Int32Array  # [rows] indices of the tokens in the sequence, ascending
    counts: Int32Array  # [rows] number of labels
    labels: Int32Array  # first those of the first row, and so on

    @staticmethod
    def every(labels: Int32Array) -> "Rows":
        """Return the rows of a sequence of which each token has one label."""
        return Rows(np.arange(len(labels), dtype=np.int32), np.ones(len(labels), np.int32), labels)

    def __bool__(self) -> bool:
        return len(self.places) > 0

    def before(self, token: int) -> int:
        """Return the number of rows before a token."""
        return int(np.searchsorted(self.places, token))

    def part(self, start: int, stop: int) -> "Rows":
        """Return the rows of the tokens [start, stop), as a sequence of its own."""
        part = slice(self.before(start), self.before(stop))
        first = int(self.counts[: part.start].sum())
        counts = self.counts[part]
        labels = self.labels[first : first + int(counts.sum())]
        return Rows(self.places[part] - np.int32(start), counts, labels)


NO_ROWS = Rows(NO_TOKENS, NO_TOKENS, NO_TOKENS)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of new tokens of one prompt."""

    token_ids: Int32Array
    start: int  # position of the first token
    prefix: int  # index of its `Prefix`
    parent: int = -1  # index of the parent segment; -1 = none
    slots: Int32Array | None = None  # KV slots of its first tokens; other keys are not stored
    label_ids: Int32Array = field(default_factory=lambda: NO_TOKENS)  # of the last token
    need_lse: bool = False
    rows: Rows | None = None  # the scored tokens; None = the last one, if it has labels
    states: Sequence[tuple[int, int]] = ()  # (number of tokens, slot of the state after them)


@dataclass(slots=True)
class SegmentColumns:
    """Segments as a list per field, which is faster to fill for hundreds of items."""

    token_ids: list[Int32Array] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    slots: list[Int32Array | None] = field(default_factory=list)
    label_ids: list[Int32Array] = field(default_factory=list)
    rows: list[Rows | None] = field(default_factory=list)
    need_lse: list[bool] = field(default_factory=list)
    states: list[Sequence[tuple[int, int]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.start)

    def add(self, segment: Segment) -> int:
        """Add a segment at the end; return its index."""
        labels = segment.label_ids if segment.rows is None else segment.rows.labels
        return self.add_like(segment, [segment.token_ids], [labels], [segment.rows])

    def add_like(
        self,
        segment: Segment,
        token_ids: Sequence[Int32Array],
        label_ids: Sequence[Int32Array],
        rows: Sequence[Rows | None] | None = None,
    ) -> int:
        """Add copies of `segment` with other tokens, labels and rows; return the first index.

        Without `rows`, each is scored at its last token.
        """
        first = len(self)
        count = len(token_ids)
        self.token_ids += token_ids
        self.start += [segment.start] * count
        self.prefix += [segment.prefix] * count
        self.parent += [segment.parent] * count
        self.slots += [segment.slots] * count
        self.label_ids += label_ids
        self.rows += [None] * count if rows is None else rows
        self.need_lse += [segment.need_lse] * count
        self.states += [segment.states] * count
        return first


def pack(
    segments: Sequence[Segment], prefixes: Sequence[Prefix], *, num_top: int = 0
) -> PackedBatch:
    """Build the batch of these segments, in this order."""
    columns = SegmentColumns()
    for segment in segments:
        columns.add(segment)
    return pack_columns(columns, prefixes, num_top=num_top)


def pack_columns(
    segments: SegmentColumns, prefixes: Sequence[Prefix], *, num_top: int = 0
) -> PackedBatch:
    """Build the batch of these segments, in this order."""
    tokens = segments.token_ids
    label_ids = segments.label_ids
    bounds = [0, *accumulate(map(len, tokens))]
    scored = [index for index, ids in enumerate(label_ids) if len(ids)]
    labels = [ids for ids in label_ids if len(ids)]
    kept: list[tuple[int, int]] = []
    if any(segments.states):
        for first, ends in zip(bounds[:-1], segments.states, strict=True):
            kept += [(first + count - 1, slot) for count, slot in ends]
    cu_seqlens, starts, parent, request_of, prefix_lens, score_rows, cu_labels, *states = _int32(
        [
            bounds,
            segments.start,
            segments.parent,
            segments.prefix,
            [p.length for p in prefixes],
            [bounds[index + 1] - 1 for index in scored],
            [0, *accumulate(map(len, labels))],
            [p.state for p in prefixes],
            [row for row, _ in kept],
            [slot for _, slot in kept],
        ]
    )
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    shift = starts - cu_seqlens[:-1]
    need_lse = np.array([segments.need_lse[index] for index in scored], dtype=np.bool_)
    if any(segments.rows):
        last = zip(lengths[scored] - 1, np.diff(cu_labels), strict=True)
        rows = [
            segments.rows[index] or Rows(*_int32([[place], [count], []]))
            for index, (place, count) in zip(scored, last, strict=True)
        ]
        per_segment = [len(scored_rows.places) for scored_rows in rows]
        score_rows = np.concatenate([scored_rows.places for scored_rows in rows])
        score_rows = score_rows + cu_seqlens[scored].repeat(per_segment)
        counts = np.concatenate([scored_rows.counts for scored_rows in rows])
        cu_labels = np.append(np.int32(0), np.cumsum(counts, dtype=np.int32))
        need_lse = need_lse.repeat(per_segment)
    return PackedBatch(
        token_ids=np.concatenate([NO_TOKENS, *tokens]),
        # Number the rows of the batch, then shift each segment's numbers to its start.
        positions=np.arange(bounds[-1], dtype=np.int32) + shift.repeat(lengths),
        cu_seqlens=cu_seqlens,
        parent=parent,
        request_of=request_of,
        prefix_lens=prefix_lens,
        page_table=_page_table(prefixes),
        slot_mapping=_slot_mapping(segments.slots, bounds),
        score_rows=score_rows,
        cu_labels=cu_labels,
        label_token_ids=np.concatenate([NO_TOKENS, *labels]),
        need_lse=need_lse,
        prefix_states=states[0],
        state_rows=states[1],
        state_slots=states[2],
        num_top=num_top,
    )


def page_slots(pages: Int32Array, start: int, stop: int, page_size: int) -> Int32Array:
    """Return the slots of the positions [start, stop) of a sequence whose keys are in `pages`."""
    first, skipped = divmod(start, page_size)
    bases = pages[first : -(-stop // page_size)] * page_size
    slots = bases[:, None] + np.arange(page_size, dtype=np.int32)
    return slots.reshape(-1)[skipped : skipped + stop - start]


def prefix_slots(batch: PackedBatch, request: int, page_size: int) -> np.ndarray:
    """Return the KV slots of a request's cached tokens, int64."""
    length = int(batch.prefix_lens[request])
    pages = batch.page_table[request, : -(-length // page_size)].astype(np.int64)
    return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:length]


def _slot_mapping(slots: Sequence[Int32Array | None], bounds: Sequence[int]) -> Int32Array:
    mapping = np.empty(bounds[-1], dtype=np.int32)
    mapping.fill(-1)
    for index, kept in enumerate(slots):
        if kept is not None:
            mapping[bounds[index] : bounds[index] + len(kept)] = kept
    return mapping


def _page_table(prefixes: Sequence[Prefix]) -> Int32Array:
    width = max([len(p.pages) for p in prefixes], default=0)
    table = np.empty((len(prefixes), width), dtype=np.int32)
    table.fill(-1)
    for row, prefix in enumerate(prefixes):
        table[row, : len(prefix.pages)] = prefix.pages
    return table


def int32_array(values: Sequence[int]) -> Int32Array:
    """Return an array of integers, in a third of the time of np.array.

    Raises:
        struct.error: a number does not fit 32 bits.
    """
    return np.frombuffer(bytearray(struct.pack(f"{len(values)}i", *values)), dtype=np.int32)


def _int32(columns: Sequence[Sequence[int]]) -> list[Int32Array]:
    """Return an array for each list. They are views of one array, because a call of NumPy for each
    takes several times as long."""
    together = int32_array([*chain(*columns)])
    stop = 0
    return [together[stop : (stop := stop + len(values))] for values in columns]
