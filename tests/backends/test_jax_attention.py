"""Promise: attention of the JAX backend equals float64 NumPy; the Pallas kernel runs
interpreted."""

from functools import partial

import numpy as np
import pytest

from support.attention_oracle import attention as oracle
from support.backends import needs_jax
from support.batches import random_batch
from support.slow import slow

pytestmark = needs_jax

PAGE, SLOTS, HEADS, KV_HEADS, DIM, LAYERS = 4, 512, 4, 2, 16, 2


@pytest.fixture(scope="module")
def attention():
    """attention(seed, window, prefix pass) -> pairs (found, wanted): of all rows, and of scored
    rows."""
    import jax
    import jax.numpy as jnp

    from gpuscore.backends.jax.attention import Attention, Pool, attend, prefix_pass
    from gpuscore.backends.jax.decoder import EVERYTHING, tile_by_tile
    from gpuscore.backends.jax.layout import ProgramSizes, TileSizes, padded
    from gpuscore.backends.jax.prefix_pallas import prefix_pass as kernel

    sizes = ProgramSizes(1024, 256, TileSizes(64, 64, 8))
    passes = {"xla": prefix_pass, "pallas": partial(kernel, interpret=True)}

    @partial(jax.jit, static_argnames=("windowed", "name"))
    def run(tables, pool, window, q, k, v, windowed, name):
        attention = Attention(DIM**-0.5, HEADS // KV_HEADS, sizes.tiling, windowed, passes[name])

        def one(tile):
            rows = q[tile.rows.place]
            return attend(attention, tables, tile, pool, jnp.int32(1), window, rows, k, v)

        return tile_by_tile(tables.every, one), tile_by_tile(tables.scored, one)

    def make(seed, window, name):
        rng = np.random.default_rng(seed)
        batch = random_batch(rng, SLOTS, PAGE)
        q = rng.normal(size=(1024, HEADS, DIM))
        k, v = rng.normal(size=(2, 1024, KV_HEADS, DIM))
        held = np.full((2, LAYERS, SLOTS, KV_HEADS, DIM), np.nan)
        for row, length in enumerate(batch.prefix_lens):  # NaN in all slots that hold nothing
            slots = [batch.page_table[row, i // PAGE] * PAGE + i % PAGE for i in range(length)]
            held[:, 1, slots] = rng.normal(size=(2, length, KV_HEADS, DIM))
        pool = Pool(*held.reshape(2, LAYERS, -1, PAGE, KV_HEADS, DIM).astype(np.float32))
        found, scored = run(
            padded(batch, sizes, PAGE, SLOTS),
            pool,
            np.int32(window or EVERYTHING),
            *(x.astype(np.float32) for x in (q, k, v)),
            windowed=window is not None,
            name=name,
        )
        rows, count = slice(0, batch.num_tokens), len(batch.score_rows)
        want = oracle(batch, PAGE, q[rows], k[rows], v[rows], held[0, 1], held[1, 1], window)
        return (found[rows], want), (scored[:count], want[batch.score_rows])

    return make


@pytest.mark.parametrize(
    ("name", "window"), [("xla", None), ("pallas", 9), *slow(("xla", 9), ("pallas", None))]
)
def test_against_the_oracle(attention, name, window):
    """Several requests share a tile, with and without prefix; segments are long, parents
    anywhere."""
    for seed in range(3 if name == "xla" else 2):
        for found, want in attention(seed, window, name):
            np.testing.assert_allclose(found, want, atol=2e-5, rtol=0)


def test_the_kernel_lowers_for_tpus():
    """Lower to the TPU compiler's input, at the sizes of a real model: as far as a CPU can go."""
    import jax
    import jax.numpy as jnp

    from gpuscore.backends.jax.attention import Attention, Pool, prefix_pass
    from gpuscore.backends.jax.layout import Bounds, ProgramSizes, Rows, Tile, TileSizes, padded
    from gpuscore.backends.jax.prefix_pallas import prefix_pass as kernel

    def of(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    sizes = ProgramSizes(4096, 65536, TileSizes(512, 512, 32))
    batch = random_batch(np.random.default_rng(0), SLOTS, PAGE)
    side = of(2, 100, 64, 8, 128, dtype=jnp.bfloat16)
    traced = jax.jit(partial(kernel, Attention(0.1, 2, sizes.tiling, True, prefix_pass))).trace(
        padded(batch, sizes, PAGE, SLOTS),
        Tile(Rows(*(of(512),) * 6), Bounds(*(of(),) * 7)),
        Pool(side, side),
        of(),
        of(),
        of(512, 16, 128, dtype=jnp.bfloat16),
    )
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
