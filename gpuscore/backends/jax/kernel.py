"""Attention as one Pallas kernel for TPUs. **Not measured, and not run, on hardware yet.**

One program for each tile of query rows (`tile_program`). It goes through the blocks of cached keys
of the requests that its rows belong to, then through the blocks of the batch's own keys that its
rows may see (`layout.Bounds`), in one running softmax. While the rows are multiplied with one
block, the next block is copied to the chip: page by page, or whole if it is of the batch. Nothing
is gathered into a tensor first, and scores never leave the chip.

Keys and values are stored as `Heads.joined` returns them, queries as `Heads.spread` does. So each
product reads tiles of full width, and computes all heads that share these tiles.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gpuscore.backends.jax import tile_program
from gpuscore.backends.jax.attention import Attention, LayerKeys
from gpuscore.backends.jax.heads import Heads
from gpuscore.backends.jax.layout import RowTiles, TileSizes

ON_CHIP = 64 * 2**20  # bytes of a chip's vector memory that a program may take, of 128 MiB
FIELDS = 8  # numbers of each row, three of them used; transposing needs a multiple of 8
# Blocks of keys that a tile reads for 500 items of 20 tokens after a prefix of 2,000; XLA's cost
# estimate assumes such a batch.
USUAL_BLOCKS = 10


@dataclass(frozen=True, slots=True)
class PallasAttend:
    """`attention.Attend`; `interpret` runs the kernel without a TPU."""

    interpret: bool = False

    def form(self, heads: Heads, q: Array) -> Array:
        return heads.spread(q)

    def plain(self, heads: Heads, out: Array) -> Array:
        return heads.gathered(out)

    def __call__(self, attention: Attention, chosen: RowTiles, keys: LayerKeys, q: Array) -> Array:
        tiles, count = chosen
        pool, layer, window, kv = keys
        tables = attention.tables
        heads = attention.heads
        tiling = attention.tiling
        tokens = len(q)
        rows = tiling.rows
        block = tiling.batch_keys
        tile_count = tokens // tiling.rows
        page_size = pool.pages.shape[2]
        assert block == tiling.prefix_pages * page_size  # noqa: S101  (blocks share buffers)
        fields = jnp.pad(jnp.stack(tiles.rows), ((0, FIELDS - len(tiles.rows)), (0, 0)))
        row_fields = fields.reshape(FIELDS, tile_count, rows).transpose(1, 0, 2)
        key_fields = jnp.stack([tables.seen_until, tables.positions]).reshape(2, -1, block)
        members = min(heads.together, heads.kv) * heads.group * rows
        scalars = (
            jnp.stack([layer, window, count]),
            *tiles.bounds,
            tiles.blocks,
            tables.prefix_lens,
            tables.block_starts,
            tables.pages,
        )
        here = pl.BlockSpec(memory_space=pl.ANY)
        columns = pl.BlockSpec((rows, q.shape[1]), lambda i, *_: (i, 0))
        setting = heads, attention.scale, attention.windowed, attention.margin
        return pl.pallas_call(
            partial(tile_program.kernel, *setting),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=(tile_count,),
                in_specs=[
                    pl.BlockSpec((1, FIELDS, rows), lambda i, *_: (i, 0, 0)),
                    pl.BlockSpec((tokens // block, 2, block), lambda i, *_: (0, 0, 0)),
                    columns,
                    here,
                    here,
                ],
                out_specs=columns,
                scratch_shapes=[
                    pltpu.VMEM((2, block, 2 * heads.width), kv.dtype),
                    pltpu.VMEM((heads.spans, members, heads.span), q.dtype),
                    pltpu.VMEM((heads.spans, members, heads.span), jnp.float32),
                    pltpu.VMEM((heads.spans, members, tile_program.LANES), jnp.float32),
                    pltpu.VMEM((heads.spans, members, tile_program.LANES), jnp.float32),
                    pltpu.VMEM((rows, block), jnp.float32),
                    pltpu.SemaphoreType.DMA((2,)),
                ],
            ),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            input_output_aliases={len(scalars) + 2: 0},
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=ON_CHIP),
            cost_estimate=cost(heads, tokens, tiling, q.dtype.itemsize),
            interpret=self.interpret,
            name="attend",
        )(*scalars, row_fields, key_fields.transpose(1, 0, 2), q, kv, pool.pages)


def cost(heads: Heads, tokens: int, tiling: TileSizes, itemsize: int) -> pl.CostEstimate:
    """Estimate the work for a bucket of `tokens` rows that read `USUAL_BLOCKS` each."""
    rows = tiling.rows
    keys = tiling.batch_keys
    blocks = min(USUAL_BLOCKS, tokens // keys)
    scores = tokens * blocks * keys * heads.query
    moved = tokens // rows * blocks * keys * 2 * heads.width + 2 * tokens * heads.query * heads.span
    return pl.CostEstimate(
        flops=4 * scores * heads.span, bytes_accessed=moved * itemsize, transcendentals=scores
    )
