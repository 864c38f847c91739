"""`PackedBatch`, what a backend computes at a time, and its one builder (`pack`).

    query [0 .. cut)     items, each at positions cut .. cut + len
    +----------------+---------+--------+----------+
    | parent segment | item 0  | item 1 | item 2   |      one request, one batch
    +----------------+---------+--------+----------+

A query part that ran in an earlier batch is a cached prefix instead, and has no rows here.

Sizes in shape comments: T tokens, S segments, R requests, N scored rows, L labels in all, P pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpuscore.arrays import BoolArray, Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One forward pass over many segments, int32 throughout.

    The mask rule: a token sees its request's cached prefix, all of its segment's parent, and the
    earlier tokens of its own segment, itself included. Nothing else; there is no delimiter.
    `visible_rows` and `prefix_slots` are that rule as code.
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


def visible_rows(batch: PackedBatch) -> BoolArray:
    """The mask rule: [T, T], whether row i sees row j of the same batch.

    Every row also sees the whole cached prefix of its request (`prefix_slots`), and in a layer with
    a sliding window only keys at positions over its own minus the window.
    """
    segment = np.repeat(np.arange(len(batch.parent)), np.diff(batch.cu_seqlens))  # [T]
    row = np.arange(len(segment))
    own = (segment[:, None] == segment) & (row[:, None] >= row)
    seen: BoolArray = own | (batch.parent[segment][:, None] == segment)
    return seen


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
class Prefix:
    """What a request's segments find in the cache: the first `length` tokens, in `pages`."""

    length: int
    pages: Int32Array


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of new tokens of one prompt."""

    token_ids: Int32Array
    start: int  # position of the first token
    prefix: int  # index of its `Prefix`
    parent: int = -1  # index of the segment that is fully visible
    slots: Int32Array | None = None  # where to keep its keys and values
    label_ids: Int32Array | None = None  # score its last token for these
    need_lse: bool = False
    every_row: bool = False  # score each of its tokens instead, for one of `label_ids` each


def pack(
    segments: Sequence[Segment], prefixes: Sequence[Prefix], *, need_top: bool = False
) -> PackedBatch:
    """The batch of these segments, in this order."""
    lengths = np.array([len(s.token_ids) for s in segments], dtype=np.int64)
    cu_seqlens = _cumulative(lengths)
    starts = np.array([s.start for s in segments], dtype=np.int64)
    total = int(cu_seqlens[-1])
    scored = [(i, s) for i, s in enumerate(segments) if s.label_ids is not None]
    labels = [s.label_ids for _, s in scored if s.label_ids is not None]
    num_labels = np.array([len(ids) for ids in labels], dtype=np.int64)
    score_rows = cu_seqlens[np.array([i for i, _ in scored], dtype=np.int64) + 1] - 1
    need_lse = np.array([s.need_lse for _, s in scored], dtype=np.bool_)
    if any(s.every_row for _, s in scored):
        rows = np.array([len(s.token_ids) if s.every_row else 1 for _, s in scored])
        of_row = np.repeat(np.arange(len(scored)), rows)  # [N]
        # Counted through the scored rows, then shifted so that a segment's last one is its end.
        shift = (score_rows + 1 - np.cumsum(rows))[of_row]
        score_rows = (np.arange(len(of_row)) + shift).astype(np.int32)
        num_labels, need_lse = (num_labels // rows)[of_row], need_lse[of_row]
    return PackedBatch(
        token_ids=_concatenate([s.token_ids for s in segments]),
        # Counted through the batch, then shifted to each segment's start.
        positions=(np.arange(total) + np.repeat(starts - cu_seqlens[:-1], lengths)).astype(
            np.int32
        ),
        cu_seqlens=cu_seqlens,
        parent=_int32([s.parent for s in segments]),
        request_of=_int32([s.prefix for s in segments]),
        prefix_lens=_int32([p.length for p in prefixes]),
        page_table=_page_table(prefixes),
        slot_mapping=_slot_mapping(segments, cu_seqlens),
        score_rows=score_rows,
        cu_labels=_cumulative(num_labels),
        label_token_ids=_concatenate(labels),
        need_lse=need_lse,
        need_top=need_top,
    )


def page_slots(pages: Int32Array, start: int, stop: int, page_size: int) -> Int32Array:
    """Slots of the tokens at positions `start` to `stop` of a sequence kept in `pages`."""
    positions = np.arange(start, stop, dtype=np.int32)
    slots: Int32Array = pages[positions // page_size] * page_size + positions % page_size
    return slots


def prefix_slots(batch: PackedBatch, request: int, page_size: int) -> np.ndarray:
    """int64, of the pool: where a request's cached tokens lie."""
    length = int(batch.prefix_lens[request])
    pages = batch.page_table[request, : -(-length // page_size)].astype(np.int64)
    return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:length]


def _slot_mapping(segments: Sequence[Segment], cu_seqlens: Int32Array) -> Int32Array:
    slots = np.full(cu_seqlens[-1], -1, dtype=np.int32)
    for index, segment in enumerate(segments):
        if segment.slots is not None:
            slots[cu_seqlens[index] : cu_seqlens[index + 1]] = segment.slots
    return slots


def _page_table(prefixes: Sequence[Prefix]) -> Int32Array:
    width = max((len(p.pages) for p in prefixes), default=0)
    table = np.full((len(prefixes), width), -1, dtype=np.int32)
    for row, prefix in zip(table, prefixes, strict=True):
        row[: len(prefix.pages)] = prefix.pages
    return table


def _cumulative(lengths: np.ndarray) -> Int32Array:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _concatenate(parts: Sequence[Int32Array]) -> Int32Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def _int32(values: Sequence[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)
