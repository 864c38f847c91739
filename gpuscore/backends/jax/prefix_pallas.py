"""The prefix pass as a Pallas kernel for TPUs. **Not measured, and not run, on hardware yet.**

One program per block of query rows. It loops over the pages of each request that its rows belong
to: while the rows are multiplied with one block of keys, the next block's pages are copied from
the pool, page by page, into the other half of a buffer. Nothing is gathered into a tensor first,
and scores never leave the chip. It computes the same as `attention.prefix_pass`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gpuscore.backends.jax.attention import LOWEST, Attention, Pool
from gpuscore.backends.jax.layout import Tables, Tile
from gpuscore.backends.jax.products import multiply

BLOCK_ROWS = 128  # query rows of a program
BLOCK_KEYS = 512  # at most; two blocks of keys and two of values have to fit the chip's memory


def prefix_pass(
    attention: Attention,
    tables: Tables,
    tile: Tile,
    pool: Pool,
    layer: Array,
    window: Array,
    q: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """`attention.PrefixPass`; `interpret` runs the kernel without a TPU."""
    rows, heads, dim = q.shape
    page_size, kv_heads = pool.k.shape[2:4]
    group, block = heads // kv_heads, min(BLOCK_ROWS, rows)
    # [Hkv, rows * G, D]: a block of rows is one piece for each KV head.
    queries = q.reshape(rows, kv_heads, group, dim).transpose(1, 0, 2, 3)
    queries = queries.reshape(kv_heads, rows * group, dim)
    request, position = (
        jnp.repeat(x, group)[:, None] for x in (tile.rows.request, tile.rows.position)
    )
    numbers = jnp.stack([layer, window, tile.bounds.request_start, tile.bounds.request_stop])
    pages = min(attention.tiling.prefix_pages, BLOCK_KEYS // page_size)
    width = block * group
    of_rows = pl.BlockSpec((width, 1), lambda i, *_: (i, 0))
    of_heads = pl.BlockSpec((kv_heads, width, dim), lambda i, *_: (0, i, 0))
    of_lse = pl.BlockSpec((kv_heads, width, 1), lambda i, *_: (0, i, 0))
    in_pool = pl.BlockSpec(memory_space=pl.ANY)
    buffer = pltpu.VMEM((2, pages, page_size, kv_heads, dim), q.dtype)
    out, lse = pl.pallas_call(
        partial(_kernel, scale=attention.scale, windowed=attention.windowed),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(rows // block,),
            in_specs=[of_rows, of_rows, of_heads, in_pool, in_pool],
            out_specs=[of_heads, of_lse],
            scratch_shapes=[
                buffer,
                buffer,
                pltpu.VMEM((kv_heads, width, 1), jnp.float32),
                pltpu.VMEM((kv_heads, width, 1), jnp.float32),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(queries.shape, jnp.float32),
            jax.ShapeDtypeStruct((*queries.shape[:2], 1), jnp.float32),
        ],
        interpret=interpret,
    )(
        numbers,
        tables.prefix_lens,
        tables.page_starts,
        tables.pages,
        request,
        position,
        queries,
        pool.k,
        pool.v,
    )
    return _by_row(out, rows, group), _by_row(lse, rows, group)[..., 0]


def _by_row(x: Array, rows: int, group: int) -> Array:
    """[Hkv, rows * G, n] -> [rows, Hkv * G, n]."""
    split = x.reshape(len(x), rows, group, -1).transpose(1, 0, 2, 3)
    return split.reshape(rows, len(x) * group, -1)


def _kernel(
    numbers: Any,  # layer, window, first request, last request + 1
    prefix_lens: Any,
    page_starts: Any,
    page_list: Any,
    request: Any,  # [w, 1], w = block * G
    position: Any,  # [w, 1]
    q: Any,  # [Hkv, w, D]
    k_pool: Any,
    v_pool: Any,
    out: Any,  # [Hkv, w, D]
    lse: Any,  # [Hkv, w, 1]
    k_buffer: Any,  # [2, pages, page size, Hkv, D]
    v_buffer: Any,
    most: Any,  # [Hkv, w, 1]
    total: Any,
    semaphores: Any,  # [2, sides]
    *,
    scale: float,
    windowed: bool,
) -> None:
    _, pages, page_size, kv_heads, dim = k_buffer.shape
    step = pages * page_size
    layer, window = numbers[0], numbers[1]
    out[...] = jnp.zeros_like(out)
    most[...] = jnp.full_like(most, LOWEST)
    total[...] = jnp.zeros_like(total)

    def copy(start: Array, block: Array, half: Array, begin: bool) -> None:
        """Start to copy the block's pages, or wait; places beyond the list mean its last page."""
        last = page_list.shape[0] - 1

        def one(index: Array, done: None) -> None:
            page = page_list[jnp.minimum(start + block * pages + index, last)]
            for side, (pool, buffer) in enumerate(((k_pool, k_buffer), (v_pool, v_buffer))):
                moved = pltpu.make_async_copy(
                    pool.at[layer, page], buffer.at[half, index], semaphores.at[half, side]
                )
                moved.start() if begin else moved.wait()

        lax.fori_loop(0, pages, one, None)

    def one_request(index: Array, done: None) -> None:
        length, start = prefix_lens[index], page_starts[index]
        blocks = pl.cdiv(length, step)
        mine = request[...] == index  # [w, 1]

        def add(block: Array, done: None) -> None:
            half = lax.rem(block, 2)

            @pl.when(block + 1 < blocks)
            def copy_next() -> None:
                copy(start, block + 1, 1 - half, begin=True)

            copy(start, block, half, begin=False)
            keys = block * step + lax.broadcasted_iota(jnp.int32, (1, step), 1)
            seen = mine & (keys < length)
            if windowed:
                seen &= keys > position[...] - window
            inside = block * step + lax.broadcasted_iota(jnp.int32, (step, 1), 0) < length
            k_all = k_buffer[half].reshape(step, kv_heads, dim)
            v_all = v_buffer[half].reshape(step, kv_heads, dim)
            for head in range(kv_heads):
                scores = multiply(q[head], k_all[:, head], ((1,), (1,))) * scale
                scores = jnp.where(seen, scores, -jnp.inf)  # [w, step]
                higher = jnp.maximum(most[head], scores.max(-1, keepdims=True))
                weights = jnp.exp(scores - higher)
                shrunk = jnp.exp(most[head] - higher)
                total[head] = total[head] * shrunk + weights.sum(-1, keepdims=True)
                values = jnp.where(inside, v_all[:, head], 0)
                part = multiply(weights.astype(values.dtype), values, ((1,), (0,)))
                out[head] = out[head] * shrunk + part
                most[head] = higher

        @pl.when(blocks > 0)
        def go_through() -> None:
            copy(start, jnp.int32(0), jnp.int32(0), begin=True)
            lax.fori_loop(0, blocks, add, None)

    lax.fori_loop(numbers[2], numbers[3], one_request, None)
    out[...] = out[...] / jnp.where(total[...] > 0, total[...], 1)
    lse[...] = most[...] + jnp.log(total[...])
