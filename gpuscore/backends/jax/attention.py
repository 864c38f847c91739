"""The mask rule (`gpuscore.batch.visible_rows`) in two passes over tiles of rows: one over cached
prefixes, one over rows of the same batch.

Both passes give float32 outputs with their log-sum-exp and are merged by it. The keys that a tile
reads are bounds of loops (`layout.Bounds`), so one compiled program serves all lengths, and keys
that no row of a tile sees are not computed. Within a tile, visibility is a comparison of numbers
that belong to rows and keys; no mask is stored.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from gpuscore.backends.jax.indexing import chosen, part
from gpuscore.backends.jax.layout import Tables, Tile, TileSizes
from gpuscore.backends.jax.products import contract

LOWEST = -1e30  # finite, so that a row without visible keys gets no NaN from inf - inf


class Pool(NamedTuple):
    """Keys and values of cached tokens: each [layers, pages, page size, Hkv, D].

    On a CPU the bits of bfloat16 are stored as integers: XLA has no operations on bfloat16 there,
    and would convert the whole pool to float32 and back in each batch.
    """

    k: Array
    v: Array


@dataclass(frozen=True, slots=True)
class Attention:
    """Parameters of the passes that do not depend on the batch."""

    scale: float
    group: int  # query heads of a KV head
    tiling: TileSizes
    windowed: bool  # true if any layer has a window
    prefix_pass: "PrefixPass"


class PrefixPass(Protocol):
    def __call__(
        self,
        attention: Attention,
        tables: Tables,
        tile: Tile,
        pool: Pool,
        layer: Array,
        window: Array,
        q: Array,
    ) -> tuple[Array, Array]:
        """Attend from a tile's rows to the cached prefixes of their requests.

        Args:
            layer: int32 [], of the pool.
            window: int32 [], positions that a row sees, its own included.
            q: [M, H, D], in the order of `tile.rows`.

        Returns:
            The output, float32 [M, H, D], and its log-sum-exp, [M, H]; 0 and -inf for rows without
            a prefix.
        """


class Softmax(NamedTuple):
    """Running softmax over the keys seen so far; float32."""

    most: Array  # [Hkv, m] largest score
    total: Array  # [Hkv, m] sum of the weights exp(score - most)
    out: Array  # [Hkv, m, D] weighted sum of values, not yet divided by `total`


def attend(
    attention: Attention,
    tables: Tables,
    tile: Tile,
    pool: Pool,
    layer: Array,
    window: Array,
    q: Array,
    k: Array,
    v: Array,
) -> Array:
    """Attend: q [M, H, D] of a tile's rows, k and v [T, Hkv, D] of all rows -> [M, H, D]."""
    with jax.named_scope("own_pass"):
        own = own_pass(attention, tables, tile, window, q, k, v)
    with jax.named_scope("prefix_pass"):
        prefix = attention.prefix_pass(attention, tables, tile, pool, layer, window, q)
    with jax.named_scope("merge"):
        return merge(*own, *prefix).astype(q.dtype)


def store(tables: Tables, pool: Pool, layer: Array, k: Array, v: Array) -> Pool:
    """Return the pool with the keys and values of rows that have a slot added."""
    page, offset = lax.div(tables.slots, pool.k.shape[2]), lax.rem(tables.slots, pool.k.shape[2])
    return Pool(
        *(
            side.at[layer, page, offset].set(as_type(x, side.dtype), mode="drop")
            for side, x in zip(pool, (k, v), strict=True)
        )
    )


def as_type(x: Array, dtype: jnp.dtype) -> Array:
    """Return x as `dtype`, with the same bits."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def merge(out: Array, lse: Array, other: Array, other_lse: Array) -> Array:
    """Merge two parts of one softmax, float32 [M, H, D] and [M, H]; `lse` must be finite."""
    most = jnp.maximum(lse, other_lse)
    one, two = jnp.exp(lse - most), jnp.exp(other_lse - most)
    return (out * one[..., None] + other * two[..., None]) / (one + two)[..., None]


def own_pass(
    attention: Attention, tables: Tables, tile: Tile, window: Array, q: Array, k: Array, v: Array
) -> tuple[Array, Array]:
    """Attend to rows of the batch: the whole root, and the row's branch up to itself.

    Of the branch, a row sees its own segment and those that it continues.
    """
    step, rows, bounds = attention.tiling.own_keys, tile.rows, tile.bounds
    in_root = jnp.maximum(bounds.root_stop - bounds.root_start, 0)
    in_branch = bounds.branch_stop - bounds.branch_start
    queries = by_kv_head(q, attention.group)

    def add(index: Array, state: Softmax) -> Softmax:
        of_root = index < in_root
        block = jnp.where(of_root, bounds.root_start, bounds.branch_start - in_root) + index
        first = jnp.where(of_root, rows.root_start, rows.branch_start)
        stop = jnp.where(of_root, rows.root_stop, rows.place + 1)
        keys = block * step + jnp.arange(step)
        seen = (keys >= first[:, None]) & (keys < stop[:, None])
        seen &= part(tables.seen_until, block * step, step) > rows.place[:, None]
        if attention.windowed:
            positions = part(tables.positions, block * step, step)
            seen &= positions > (rows.position - window)[:, None]
        k_block, v_block = (part(x, block * step, step) for x in (k, v))
        return update(attention, state, queries, k_block, v_block, seen)

    return finished(lax.fori_loop(0, in_root + in_branch, add, fresh(queries)), attention.group)


def prefix_pass(
    attention: Attention,
    tables: Tables,
    tile: Tile,
    pool: Pool,
    layer: Array,
    window: Array,
    q: Array,
) -> tuple[Array, Array]:
    """`PrefixPass` in plain XLA: pages are gathered block by block."""
    count, rows, last = attention.tiling.prefix_pages, tile.rows, len(tables.pages) - 1
    page_size, heads, dim = pool.k.shape[2:]
    step = count * page_size
    queries = by_kv_head(q, attention.group)

    def one_request(request: Array, state: Softmax) -> Softmax:
        length, start, blocks = (
            part(x, request, 1)[0]
            for x in (tables.prefix_lens, tables.page_starts, tables.prefix_blocks)
        )
        mine = rows.request == request

        def add(block: Array, state: Softmax) -> Softmax:
            # Entries after the request's last page belong to others; `inside` masks their keys.
            places = jnp.minimum(start + block * count + jnp.arange(count), last)
            pages = chosen(tables.pages, places)
            keys = block * step + jnp.arange(step)
            inside = keys < length
            seen = mine[:, None] & inside
            if attention.windowed:
                seen &= keys > (rows.position - window)[:, None]
            k_block, v_block = (
                as_type(side.at[layer, pages].get(mode="promise_in_bounds"), q.dtype)
                for side in pool
            )
            k_block, v_block = (x.reshape(step, heads, dim) for x in (k_block, v_block))
            # Memory that was never written may hold NaN, and 0 * NaN is NaN.
            v_block = jnp.where(inside[:, None, None], v_block, 0)
            return update(attention, state, queries, k_block, v_block, seen)

        first = jnp.int32(0)
        if attention.windowed:
            first = lax.div(jnp.maximum(0, tile.bounds.position - window + 1), step)
        return lax.fori_loop(first, blocks, add, state)

    requests = tile.bounds.request_start, tile.bounds.request_stop
    return finished(lax.fori_loop(*requests, one_request, fresh(queries)), attention.group)


def by_kv_head(q: Array, group: int) -> Array:
    """Group query heads by their KV head: [M, Hkv * G, D] -> [Hkv, G * M, D]."""
    rows, _, dim = q.shape
    split = q.reshape(rows, -1, group, dim).transpose(1, 2, 0, 3)
    return split.reshape(-1, group * rows, dim)


def by_row(x: Array, group: int) -> Array:
    """Undo `by_kv_head`: [Hkv, G * M, ...] -> [M, Hkv * G, ...]."""
    heads, rows = x.shape[0], x.shape[1] // group
    split = jnp.moveaxis(x.reshape(heads, group, rows, *x.shape[2:]), 2, 0)
    return split.reshape(rows, heads * group, *x.shape[2:])


def finished(state: Softmax, group: int) -> tuple[Array, Array]:
    """Return output [M, H, D] and log-sum-exp [M, H]; 0 and -inf for rows that saw no key."""
    lse = state.most + jnp.log(state.total)
    out = state.out / jnp.where(state.total > 0, state.total, 1)[..., None]
    return by_row(out, group), by_row(lse, group)


def fresh(q: Array) -> Softmax:
    """Return the softmax over no keys, for queries [Hkv, m, D]."""
    rows = q.shape[:2]
    most, total = jnp.full(rows, LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32)
    return Softmax(most, total, jnp.zeros(q.shape, jnp.float32))


def update(
    attention: Attention, state: Softmax, q: Array, k: Array, v: Array, seen: Array
) -> Softmax:
    """Add n keys to the softmax: q [Hkv, G * M, D], k and v [n, Hkv, D], seen bool [M, n]."""
    scores = contract(q, k, ((2,), (2,)), ((0,), (1,))) * attention.scale  # [Hkv, m, n]
    tiled = scores.reshape(len(q), attention.group, -1, len(k))
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
