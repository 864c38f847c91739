"""The attention kernel for TPUs, written in Pallas: each program computes one tile of query rows.

`kernel.py` launches it and describes the algorithm. Keys and values are read block by block: first
the cached blocks of each request's prefix, then the blocks of the batch's own tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gpuscore.backends.jax.attention import LOWEST
from gpuscore.backends.jax.heads import Heads
from gpuscore.backends.jax.products import multiply

LANES = 128  # columns of a tile on the chip; one number per row is repeated in all of them

# Which block of keys is next: the request, the block of its cached prefix, and the index in the
# tile's list of the batch's own blocks.
Place: TypeAlias = tuple[Array, Array, Array]


class Refs(NamedTuple):
    """Arguments of the kernel; those up to `pages` are prefetched before it begins."""

    numbers: Any  # layer, window, number of rows
    block_start: Any  # see `layout.Bounds`
    block_stop: Any
    request_start: Any
    request_stop: Any
    position: Any
    batch_blocks: Any
    prefix_lens: Any
    block_starts: Any
    pages: Any
    row_fields: Any  # [1, FIELDS, rows] numbers of each query row
    key_fields: Any  # [blocks, 2, keys] numbers of each key of the batch
    q: Any  # [rows, H * span]
    kv: Any  # [margin + T + margin, 2 * width] of the batch's own tokens, not on the chip
    pool: Any  # [layers, pages, page size, 2 * width], not on the chip
    out: Any  # [rows, H * span]
    buffer: Any  # [2, keys, 2 * width]; one half is read while the other is filled
    queries: Any  # [spans, members, span]; members are rows of each head of a span
    sums: Any  # [spans, members, span] weighted sums of the values
    max_score: Any  # [spans, members, LANES] largest score so far, before scaling
    weight_sum: Any  # [spans, members, LANES] sum of the softmax weights
    mask: Any  # [rows, keys] 0 where a row sees a key, otherwise -inf
    semaphores: Any  # [2]


@dataclass(frozen=True, slots=True)
class TileProgram:
    """The computation of one tile of query rows, block of keys by block of keys."""

    heads: Heads
    scale: float
    windowed: bool
    margin: int
    refs: Refs
    tile: Array  # number of the tile

    @property
    def keys(self) -> int:
        """Number of keys in a block."""
        return int(self.refs.buffer.shape[1])

    def run(self) -> None:
        refs = self.refs
        tile = self.tile
        rows = refs.q.shape[0]

        @pl.when(tile * rows >= refs.numbers[2])
        def no_rows() -> None:
            refs.out[...] = jnp.zeros_like(refs.out)

        @pl.when(tile * rows < refs.numbers[2])
        def some_rows() -> None:
            self._begin(rows)
            self._add_blocks(refs.row_fields[0].T)
            self._finish(rows)

    def _begin(self, rows: int) -> None:
        refs = self.refs
        span_of = self.heads.span
        for span, place, head in _placed(self.heads):
            at = pl.ds(place * rows, rows)
            refs.queries[span, at] = refs.q[:, pl.ds(head * span_of, span_of)]
        refs.sums[...] = jnp.zeros_like(refs.sums)
        refs.max_score[...] = jnp.full_like(refs.max_score, LOWEST)
        refs.weight_sum[...] = jnp.zeros_like(refs.weight_sum)

    def _finish(self, rows: int) -> None:
        refs = self.refs
        span_of = self.heads.span
        for span, place, head in _placed(self.heads):
            at = pl.ds(place * rows, rows)
            done = refs.sums[span, at] / refs.weight_sum[span, at, :1]
            refs.out[:, pl.ds(head * span_of, span_of)] = done.astype(refs.out.dtype)

    def _add_blocks(self, columns: Array) -> None:
        """Add all blocks to the softmax; `columns` is [rows, FIELDS]."""
        refs = self.refs
        tile = self.tile

        def add_block(state: tuple[Place, Array]) -> tuple[Place, Array]:
            place, half = state
            following = self._after(place)

            @pl.when(self._exists(following))
            def copy_next() -> None:
                self._begin_copy(following, 1 - half)

            # `wait` only counts bytes, and all blocks have as many: so any block may stand here.
            self._batch_copy(jnp.int32(0), half).wait()

            @pl.when(self._in_prefix(place))
            def of_prefix() -> None:
                self._mask_prefix(place, half, columns)

            @pl.when(~self._in_prefix(place))
            def of_batch() -> None:
                self._mask_batch(place, columns)

            self._add(half)
            return following, 1 - half

        request = refs.request_start[tile]
        begin = request, self._first_block(request), refs.block_start[tile]
        self._begin_copy(begin, jnp.int32(0))
        lax.while_loop(lambda state: self._exists(state[0]), add_block, (begin, jnp.int32(0)))

    def _in_prefix(self, place: Place) -> Array:
        last: Array = self.refs.request_stop[self.tile]
        return place[0] < last

    def _exists(self, place: Place) -> Array:
        last: Array = self.refs.block_stop[self.tile]
        return self._in_prefix(place) | (place[2] < last)

    def _stop(self, request: Array) -> Array:
        """Return the number of the block after a request's last one."""
        starts = self.refs.block_starts
        stop: Array = starts[jnp.minimum(request + 1, starts.shape[0] - 1)]
        return stop

    def _first_block(self, request: Array) -> Array:
        """Return a request's first block that holds a key which a row of the tile may see."""
        start: Array = self.refs.block_starts[request]
        if not self.windowed:
            return start
        behind = jnp.maximum(0, self.refs.position[self.tile] - self.refs.numbers[1] + 1)
        near = jnp.minimum(start + lax.div(behind, self.keys), self._stop(request) - 1)
        return jnp.maximum(start, near)

    def _after(self, place: Place) -> Place:
        """Return the block that follows."""
        request, block, index = place
        of_prefix = self._in_prefix(place)
        ends = of_prefix & (block + 1 >= self._stop(request))
        following = jnp.where(ends, request + 1, request)
        block = jnp.where(ends, self._first_block(following), block + 1)
        return following, block, jnp.where(of_prefix, index, index + 1)

    def _begin_copy(self, place: Place, half: Array) -> None:
        refs = self.refs
        size = self.refs.pool.shape[2]
        count = self.keys // size

        def of_page(index: Array, done: None) -> None:
            page = refs.pages[place[1] * count + index]
            at = pl.ds(pl.multiple_of(index * size, size), size)
            pltpu.make_async_copy(
                refs.pool.at[refs.numbers[0], page],
                refs.buffer.at[half, at],
                refs.semaphores.at[half],
            ).start()

        @pl.when(self._in_prefix(place))
        def copy_pages() -> None:
            lax.fori_loop(0, count, of_page, None)

        @pl.when(~self._in_prefix(place))
        def copy_from_batch() -> None:
            self._batch_copy(refs.batch_blocks[place[2]], half).start()

    def _batch_copy(self, block: Array, half: Array) -> Any:
        """Return a copy, not started yet, of a block of the batch's own keys and values."""
        refs = self.refs
        start = pl.multiple_of(self.margin + block * self.keys, self.keys)
        return pltpu.make_async_copy(
            refs.kv.at[pl.ds(start, self.keys)], refs.buffer.at[half], refs.semaphores.at[half]
        )

    def _mask_prefix(self, place: Place, half: Array, columns: Array) -> None:
        refs = self.refs
        keys = self.keys
        request, block, _ = place
        first = (block - refs.block_starts[request]) * keys
        length = refs.prefix_lens[request]
        key = first + lax.broadcasted_iota(jnp.int32, (1, keys), 1)
        visible = (columns[:, 2:3] == request) & (key < length)
        if self.windowed:
            visible &= key > columns[:, 1:2] - refs.numbers[1]
        refs.mask[...] = jnp.where(visible, 0.0, -jnp.inf)

        @pl.when(first + keys > length)
        def clear_rest() -> None:
            # Memory that was never written may hold NaN, and 0 * NaN is NaN.
            inside = first + lax.broadcasted_iota(jnp.int32, (keys, 1), 0) < length
            held = refs.buffer[half]
            refs.buffer[half] = jnp.where(inside, held, jnp.zeros_like(held))

    def _mask_batch(self, place: Place, columns: Array) -> None:
        refs = self.refs
        block = self.refs.batch_blocks[place[2]]
        key = block * self.keys + lax.broadcasted_iota(jnp.int32, (1, self.keys), 1)
        key_fields = refs.key_fields[block]
        visible = (key <= columns[:, :1]) & (key_fields[:1] > columns[:, :1])
        if self.windowed:
            visible &= key_fields[1:] > columns[:, 1:2] - refs.numbers[1]
        refs.mask[...] = jnp.where(visible, 0.0, -jnp.inf)

    def _add(self, half: Array) -> None:
        """Add the block in a half of the buffer to the softmax of every head."""
        refs = self.refs
        heads = self.heads
        rows = self.refs.q.shape[0]
        # exp(scale * x) = 2 ** (to_exponent * x): one product for each score instead of two.
        to_exponent = self.scale * math.log2(math.e)
        for span in range(heads.spans):
            members = len(_members(heads, span)) * rows
            of_span = span, slice(0, members)
            k, v = (
                refs.buffer[half, :, pl.ds(side + span * heads.span, heads.span)]
                for side in (0, heads.width)
            )
            scores = multiply(refs.queries[of_span], k, ((1,), (1,)))
            split = scores.reshape(-1, rows, self.keys)
            # `where`, not a sum with the mask: the score of a masked key may be NaN.
            scores = jnp.where(refs.mask[...] == 0, split, -jnp.inf).reshape(scores.shape)
            before = refs.max_score[span, :members, :1]
            most = jnp.maximum(before, scores.max(-1, keepdims=True))
            weights = jnp.exp2((scores - most) * to_exponent)
            shrunk = jnp.exp2((before - most) * to_exponent)
            total = refs.weight_sum[span, :members, :1] * shrunk + weights.sum(-1, keepdims=True)
            part = multiply(weights.astype(v.dtype), v, ((1,), (0,)))
            refs.sums[of_span] = refs.sums[of_span] * shrunk + part
            refs.weight_sum[of_span] = jnp.broadcast_to(total, (members, LANES))
            refs.max_score[of_span] = jnp.broadcast_to(most, (members, LANES))


def kernel(heads: Heads, scale: float, windowed: bool, margin: int, *refs: Any) -> None:
    """Compute one tile; Pallas runs this as one program."""
    number = pl.program_id(0)
    TileProgram(heads, scale, windowed, margin, refs=Refs(*refs), tile=number).run()


def _placed(heads: Heads) -> Iterator[tuple[int, int, int]]:
    """Yield the span of each query head, its index in the span, and its number."""
    for span in range(heads.spans):
        for place, head in enumerate(_members(heads, span)):
            yield span, place, head


def _members(heads: Heads, span: int) -> range:
    """Return the numbers of the query heads whose keys are in a span."""
    of_span = heads.together * heads.group
    return range(span * of_span, min((span + 1) * of_span, heads.query))
