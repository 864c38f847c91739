"""The mask rule (`gpuscore.types.batch.visible_rows`) in plain XLA, over tiles of rows.

A tile attends to the cached prefixes of its rows, then to rows of the same batch, in one running
softmax in float32. The lengths of sequences are bounds of loops (`layout.Bounds`), so one compiled
program serves all lengths, and blocks that no row of a tile sees are not computed. Within a block,
numbers of rows and keys are compared to find which keys a row sees; no mask is stored.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from gpuscore.backends.jax.heads import Heads
from gpuscore.backends.jax.layout import Bounds, Rows, RowTiles, Tables, TileSizes
from gpuscore.backends.jax.products import contract, element, part, put

LOWEST = -1e30  # finite, so that a row without visible keys gets no NaN from inf - inf


class Pool(NamedTuple):
    """Keys and values of cached tokens.

    On a CPU the bits of bfloat16 are stored as integers: XLA has no operations on bfloat16 there,
    and would convert the whole pool to float32 and back in each batch.
    """

    # [layers, pages, page size, 2 * Heads.width], rows as `Heads.joined` gives them.
    pages: Array


class LayerKeys(NamedTuple):
    """The keys and values that a layer's rows see."""

    pool: Pool
    layer: Array  # int32 [], of the pool
    window: Array  # int32 [], positions that a row sees, its own included
    kv: Array  # [margin + T + margin, 2 * width], `Heads.joined` of all rows of the batch


@dataclass(frozen=True, slots=True)
class Attention:
    """What all layers share: parameters, and the tables of the batch."""

    scale: float
    heads: Heads
    tiling: TileSizes
    windowed: bool  # true if any layer has a window
    tables: Tables

    @property
    def margin(self) -> int:
        """The number of unused rows before, and after, a batch's keys and values."""
        return self.tiling.batch_keys


class Attend(Protocol):
    """Attention of chosen rows of a batch. `form` and `plain` translate queries and outputs."""

    def form(self, heads: Heads, q: Array) -> Array:
        """Return queries [M, H, D] in the form of this attention, [M, columns]."""

    def plain(self, heads: Heads, out: Array) -> Array:
        """Return outputs of that form, [M, columns], as [M, H * D]."""

    def __call__(self, attention: Attention, chosen: RowTiles, keys: LayerKeys, q: Array) -> Array:
        """Attend to cached prefixes, to ancestors and to the own segment.

        Args:
            chosen: the rows' tiles and their number.
            q: [T, columns], in the order of the tiles; the output may take its memory.

        Returns:
            [T, columns]; rows after the last tile with a chosen row hold arbitrary finite numbers.
        """


class Softmax(NamedTuple):
    """Running softmax over the keys seen so far; float32."""

    most: Array  # [Hkv, m] largest score
    total: Array  # [Hkv, m] sum of the weights exp(score - most)
    out: Array  # [Hkv, m, D] weighted sum of values, not yet divided by `total`


class Tile(NamedTuple):
    """A tile of rows that attend together."""

    rows: Rows
    bounds: Bounds
    blocks: Array
    queries: Array  # [Hkv, G * M, D]


class XlaAttend:
    """`Attend` in plain XLA; its form is [M, H * D]."""

    def form(self, heads: Heads, q: Array) -> Array:
        return q.reshape(len(q), -1)

    def plain(self, heads: Heads, out: Array) -> Array:
        return out

    def __call__(self, attention: Attention, chosen: RowTiles, keys: LayerKeys, q: Array) -> Array:
        size = attention.tiling.rows
        tiles, count = chosen

        def attend_tile(index: Array, q: Array) -> Array:
            first = index * size
            rows = Rows(*(part(values, first, size) for values in tiles.rows))
            bounds = Bounds(*(element(bound, index) for bound in tiles.bounds))
            of_tile = part(q, first, size).reshape(size, -1, attention.heads.dim)
            queries = by_kv_head(of_tile, attention.heads.group)
            tile = Tile(rows, bounds, tiles.blocks, queries)
            with jax.named_scope("prefix_pass"):
                state = prefix_pass(attention, tile, keys, fresh(queries))
            with jax.named_scope("batch_pass"):
                state = batch_pass(attention, tile, keys, state)
            out = finished(state, attention.heads.group).astype(q.dtype)
            return put(q, out.reshape(size, -1), first)

        return lax.fori_loop(0, lax.div(count + size - 1, size), attend_tile, q)


def store(attention: Attention, pool: Pool, layer: Array, kv: Array) -> Pool:
    """Return the pool with the rows of kv that have a slot added, a page at a time, in place."""
    tables = attention.tables
    pages = pool.pages
    size = pool.pages.shape[2]
    assert size <= attention.margin  # noqa: S101  (else a page could reach before the first row)
    in_page = jnp.arange(size)[:, None]

    def store_run(run: Array, pages: Array) -> Array:
        row, slot, length = (
            element(x, run) for x in (tables.run_rows, tables.run_slots, tables.run_lens)
        )
        page = lax.div(slot, size)
        offset = lax.rem(slot, size)
        new = as_type(part(kv, attention.margin + row - offset, size), pages.dtype)
        place = (layer, page, jnp.int32(0), jnp.int32(0))
        shape = (1, 1, *new.shape)
        old = lax.dynamic_slice(pages, place, shape, allow_negative_indices=False)
        ours = (in_page >= offset) & (in_page < offset + length)
        both = jnp.where(ours, new, old.reshape(new.shape)).reshape(shape)
        return lax.dynamic_update_slice(pages, both, place, allow_negative_indices=False)

    with jax.named_scope("store"):
        return Pool(lax.fori_loop(0, tables.numbers.runs[0], store_run, pages))


def as_type(x: Array, dtype: jnp.dtype) -> Array:
    """Return x as `dtype`, with the same bits."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def batch_pass(attention: Attention, tile: Tile, keys: LayerKeys, state: Softmax) -> Softmax:
    """Attend to rows of the batch: ancestors of a row's segment, then its segment up to the row."""
    step = attention.tiling.batch_keys
    rows = tile.rows
    tables = attention.tables

    def add(index: Array, state: Softmax) -> Softmax:
        first = element(tile.blocks, index) * step
        seen = first + jnp.arange(step) <= rows.place[:, None]
        seen &= part(tables.seen_until, first, step) > rows.place[:, None]
        if attention.windowed:
            seen &= part(tables.positions, first, step) > (rows.position - keys.window)[:, None]
        kv = attention.heads.parts(part(keys.kv, attention.margin + first, step))
        return update(attention, state, tile.queries, kv, seen=seen)

    return lax.fori_loop(tile.bounds.block_start, tile.bounds.block_stop, add, state)


def prefix_pass(attention: Attention, tile: Tile, keys: LayerKeys, state: Softmax) -> Softmax:
    """Attend to the cached prefixes of the rows' requests; pages are gathered block by block."""
    rows = tile.rows
    bounds = tile.bounds
    queries = tile.queries
    held = keys.pool.pages
    page_size = keys.pool.pages.shape[2]
    tables = attention.tables
    count = attention.tiling.prefix_pages
    step = count * page_size

    def one_request(request: Array, state: Softmax) -> Softmax:
        length = element(tables.prefix_lens, request)
        start, stop = (element(tables.block_starts, request + end) for end in (0, 1))
        mine = rows.request == request

        def add(block: Array, state: Softmax) -> Softmax:
            pages = part(tables.pages, (start + block) * count, count)
            places = block * step + jnp.arange(step)
            inside = places < length
            seen = mine[:, None] & inside
            if attention.windowed:
                seen &= places > (rows.position - keys.window)[:, None]
            found = held.at[keys.layer, pages].get(mode="promise_in_bounds")
            k, v = attention.heads.parts(as_type(found, queries.dtype).reshape(step, -1))
            # Memory that was never written may hold NaN, and 0 * NaN is NaN.
            v = jnp.where(inside[:, None, None], v, 0)
            return update(attention, state, queries, (k, v), seen=seen)

        first = jnp.int32(0)
        if attention.windowed:
            first = lax.div(jnp.maximum(0, bounds.position - keys.window + 1), step)
        return lax.fori_loop(first, stop - start, add, state)

    return lax.fori_loop(bounds.request_start, bounds.request_stop, one_request, state)


def by_kv_head(q: Array, group: int) -> Array:
    """Group query heads by their KV head: [M, Hkv * G, D] -> [Hkv, G * M, D]."""
    rows, _, dim = q.shape
    split = q.reshape(rows, -1, group, dim).transpose(1, 2, 0, 3)
    return split.reshape(-1, group * rows, dim)


def by_row(x: Array, group: int) -> Array:
    """Undo `by_kv_head`: [Hkv, G * M, ...] -> [M, Hkv * G, ...]."""
    heads = x.shape[0]
    rows = x.shape[1] // group
    split = jnp.moveaxis(x.reshape(heads, group, rows, *x.shape[2:]), 2, 0)
    return split.reshape(rows, heads * group, *x.shape[2:])


def finished(state: Softmax, group: int) -> Array:
    """Return the output [M, H, D]; 0 for rows that saw no key."""
    return by_row(state.out / jnp.where(state.total > 0, state.total, 1)[..., None], group)


def fresh(q: Array) -> Softmax:
    """Return the softmax over no keys, for queries [Hkv, m, D]."""
    rows = q.shape[:2]
    most = jnp.full(rows, LOWEST, jnp.float32)
    total = jnp.zeros(rows, jnp.float32)
    return Softmax(most, total, jnp.zeros(q.shape, jnp.float32))


def update(
    attention: Attention, state: Softmax, q: Array, kv: tuple[Array, Array], seen: Array
) -> Softmax:
    """Add n keys to the softmax: q [Hkv, G * M, D], k and v [n, Hkv, D], seen bool [M, n]."""
    k, v = kv
    scores = contract(q, k, ((2,), (2,)), ((0,), (1,))) * attention.scale  # [Hkv, m, n]
    tiled = scores.reshape(len(q), attention.heads.group, -1, len(k))
    scores = jnp.where(seen, tiled, -jnp.inf).reshape(scores.shape)
    most = jnp.maximum(state.most, scores.max(-1))
    weights = jnp.exp(scores - most[..., None])
    shrunk = jnp.exp(state.most - most)
    return Softmax(
        most,
        state.total * shrunk + weights.sum(-1),
        state.out * shrunk[..., None]
        + contract(weights.astype(v.dtype), v, ((2,), (0,)), ((0,), (1,))),
    )
