"""The plain data that crosses every boundary (stdlib and NumPy only).

Sizes in shape comments: T tokens, S segments, R requests, N scored rows, L labels in all, P pages.
"""

from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32Array: TypeAlias = NDArray[np.int32]
Float32Array: TypeAlias = NDArray[np.float32]
Float64Array: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]

NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One request after factoring: every prompt is `query_ids + item_ids[i]`.

    `query_ids` is what all prompts share up to the cut; each item has at least one token, so that
    every scored row is computed. `label_ids[i]` belongs to `item_ids[i]`.

    With `every_position` each token of an item is scored, for one label of its own: `label_ids[i]`
    has as many as `item_ids[i]`. Nothing is shared then, because a cached prefix has no rows.

    Raises:
        ValueError: it has a query or other numbers of labels, with `every_position`.
    """

    query_ids: Int32Array  # [cut], may be empty
    item_ids: tuple[Int32Array, ...]  # each [>= 1]
    label_ids: tuple[Int32Array, ...]  # one per item, each [>= 1]
    need_lse: bool
    need_top: bool = False
    priority: int = 0  # lower runs first
    salt: str = ""  # cached prefixes are found by requests with the same salt only
    deadline: float | None = None  # seconds on the engine's clock; what has not run then is dropped
    every_position: bool = False

    def __post_init__(self) -> None:
        if self.every_position and (
            len(self.query_ids) or [*map(len, self.item_ids)] != [*map(len, self.label_ids)]
        ):
            raise ValueError("every position needs one label for each token, and no query")

    @property
    def num_rows(self) -> int:
        """Next-token distributions that are wanted: of each item, or of each of its tokens."""
        return sum(map(len, self.item_ids)) if self.every_position else len(self.item_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that a forward pass has to compute."""
        return len(self.query_ids) + sum(map(len, self.item_ids))

    @property
    def num_prompt_tokens(self) -> int:
        """Sum of the lengths of all prompts, as if each had been scored alone."""
        return len(self.query_ids) * len(self.item_ids) + sum(map(len, self.item_ids))


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of a request's life in the engine, one after the other."""

    queue: float  # from its arrival until its first batch was chosen
    batch: float  # until that batch was laid out and launched
    device: float  # until its last result was collected


# Upper bounds of the sizes that `Sizes` tells apart.
BATCH_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
BATCH_ITEMS = (0, 1, 3, 10, 30, 100, 300, 1000, 3000)  # 0: nothing but a chunk of something longer


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many of each size there were; `counts` has one more than there are bounds."""

    counts: tuple[int, ...]
    total: int  # of all sizes

    def __add__(self, other: "Sizes") -> "Sizes":
        counts = tuple(one + two for one, two in zip(self.counts, other.counts, strict=True))
        return Sizes(counts, self.total + other.total)


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What an engine has done so far. These only grow; ValueError for wrong numbers of counts."""

    batches: int  # collected
    computed_tokens: int
    cached_tokens: int  # of prompts, that the prefix cache held
    evicted_pages: int  # cached pages given up for others
    oom_retried: int  # batches that ran out of memory, their work handed out again ...
    oom_failed: int  # ... or, at the smallest size, given up with its request
    nonfinite_rows: int  # computed; an item is computed twice before its request fails
    batch_tokens: Sizes
    batch_items: Sizes  # scored rows

    def __post_init__(self) -> None:
        for sizes, bounds in ((self.batch_tokens, BATCH_TOKENS), (self.batch_items, BATCH_ITEMS)):
            if len(sizes.counts) != len(bounds) + 1:
                raise ValueError(f"{len(sizes.counts)} counts for {len(bounds)} bounds")

    def __add__(self, other: "EngineCounters") -> "EngineCounters":
        names = [item.name for item in fields(self)]
        return EngineCounters(**{n: getattr(self, n) + getattr(other, n) for n in names})


NO_COUNTERS = EngineCounters(
    *(0,) * 7,
    batch_tokens=Sizes((0,) * (len(BATCH_TOKENS) + 1), 0),
    batch_items=Sizes((0,) * (len(BATCH_ITEMS) + 1), 0),
)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine is doing, and has done."""

    requests: int  # admitted and not yet answered
    tokens: int  # of those requests
    pages_free: int
    pages_cached: int  # not in use, their content may be found again
    pages_used: int
    tokens_per_second: float  # while working, smoothed
    # The same of batches that are at least a quarter full, as all are when there is much to do: of
    # small ones a device computes a small part of what it can. 0 until there was one.
    capacity: float
    counters: EngineCounters
    restarts: int = 0  # of its process; the counters outlive them
    heartbeat_age: float = 0.0  # seconds since its process last gave a sign of life


NO_STATS = EngineStats(0, 0, 0, 0, 0, 0.0, 0.0, NO_COUNTERS)


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """What the model says at the last token of each prompt, in item order, all float32.

    `label_logits[i][j]` is the logit of label j of item i; `lse[i]` is the log-sum-exp of item i's
    logits of the full vocabulary, or of all classes (None unless asked for), so log-probability =
    logit - lse. The N rows are the items; with `every_position` they are all tokens of all items,
    one item after the other, and label j of an item is that of its token j.
    """

    label_logits: tuple[Float32Array, ...]
    lse: Float32Array | None  # [N]
    top_ids: Int32Array | None  # [N] the most probable tokens, the lowest on a tie ...
    top_logits: Float32Array | None  # [N] ... and their logits, of the sum that `lse` is of
    computed_tokens: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One forward pass over many segments, int32 throughout.

    The mask rule: a token sees its request's cached prefix, all of its segment's parent, and the
    earlier tokens of its own segment, itself included. Nothing else; there is no delimiter.
    """

    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T] an item's positions go on from the query's length
    cu_seqlens: Int32Array  # [S+1] segment boundaries
    parent: Int32Array  # [S] segment of this batch that is fully visible, -1 = none
    request_of: Int32Array  # [S] row of prefix_lens and page_table
    prefix_lens: Int32Array  # [R] cached tokens
    page_table: Int32Array  # [R, P] pages of the cached tokens, -1 padded
    slot_mapping: Int32Array  # [T] KV slot to write, -1 = not kept
    score_rows: Int32Array  # [N] rows whose next-token distribution is wanted
    cu_labels: Int32Array  # [N+1]
    label_token_ids: Int32Array  # [L]
    need_lse: BoolArray  # [N]
    need_top: bool

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class RowScores:
    """A batch's results, float32; the others than `label_logits` are None where not asked for.

    Rows of `lse` that did not ask for it hold NaN.
    """

    label_logits: Float32Array  # [L]
    lse: Float32Array | None  # [N]
    top_ids: Int32Array | None  # [N] the most probable tokens, the lowest on a tie ...
    top_logits: Float32Array | None  # [N] ... and their logits


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """What a backend can take; the engine plans within it."""

    max_tokens: int  # tokens of one batch
    page_size: int  # tokens of one KV page
    num_pages: int
    max_model_len: int  # tokens of one prompt
    vocab_rows: int  # valid token ids of prompts are 0 <= id < vocab_rows
    token_buckets: tuple[int, ...] = ()  # padded batch sizes; empty = ragged
    identity: str = ""  # of model, revision and dtype: what cached keys and values belong to
    # 0, or: a row's result has the same bits in every batch, if the chunks of a sequence end at
    # multiples of this many tokens and if where a prompt is cut depends on its query alone.
    deterministic_chunk: int = 0
    # Names of a classification model's classes, which are its labels; None = labels are tokens.
    classes: tuple[str, ...] | None = None

    @property
    def label_rows(self) -> int:
        """Valid label ids are 0 <= id < label_rows."""
        return self.vocab_rows if self.classes is None else len(self.classes)
