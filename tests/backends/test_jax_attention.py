"""Promise: attention of the JAX backend equals float64 NumPy; the Pallas kernel runs
interpreted."""

from functools import partial

import numpy as np
import pytest

from gpuscore.backends.jax.layout import ProgramSizes, TileSizes, divided
from gpuscore.backends.jax.padding import padded
from gpuscore.types.batch import visible_rows
from support.attention_oracle import attention as oracle
from support.backends import needs_jax
from support.batches import random_batch
from support.slow import slow

pytestmark = needs_jax

PAGE, SLOTS, LAYERS = 4, 512, 2
# Query heads, KV heads, size, columns of a tile: heads alone, several in a tile with a place left
# over, and heads that fill a part of their tile.
PLAIN, TOGETHER, PADDED = (4, 2, 16, 1), (6, 3, 16, 32), (2, 1, 24, 32)
# Blocks of 8 keys, so that prefixes have several, some of which a window hides.
SIZES = ProgramSizes(1024, 256, TileSizes(64, 8, 2, (256, 64)))


def heads_of(shape):
    from gpuscore.backends.jax.heads import Heads

    return Heads(*shape)


@pytest.fixture(scope="module")
def attention():
    """attention(seed, window, implementation, shape) -> pairs (found, wanted): of all rows, and of
    scored rows. With `flawed`, a key of the batch and one of a prefix are NaN, their values 0, and
    so are wanted outputs of rows that see them."""
    import jax
    import jax.numpy as jnp

    from gpuscore.backends.jax.attention import Attention, LayerKeys, Pool, XlaAttend
    from gpuscore.backends.jax.decoder import EVERYTHING
    from gpuscore.backends.jax.kernel import PallasAttend

    implementations = {"xla": XlaAttend(), "pallas": PallasAttend(interpret=True)}

    @partial(jax.jit, static_argnames=("windowed", "name", "shape"))
    def run(buffer, pool, window, q, k, v, windowed, name, shape):
        heads, attends = heads_of(shape), implementations[name]
        tables = divided(buffer, SIZES)
        setting = Attention(shape[2] ** -0.5, heads, SIZES.tiling, windowed, tables=tables)
        front = (setting.margin, setting.margin), (0, 0)
        kv = jnp.pad(heads.joined(k, v), front)

        def outputs(tiles, count):
            rows = attends.form(heads, q[tiles.rows.place])
            keys = LayerKeys(pool, jnp.int32(1), window, kv)
            out = attends(setting, (tiles, count), keys, rows)
            return attends.plain(heads, out).reshape(q.shape)

        numbers = tables.numbers
        return outputs(tables.all_rows, numbers.rows[0]), outputs(tables.scored, numbers.scored[0])

    def make(seed, window, name, shape, flawed=False):
        rng = np.random.default_rng(seed)
        batch = random_batch(rng, SLOTS, PAGE)
        query_heads, kv_heads, dim, _ = shape
        q = rng.normal(size=(1024, query_heads, dim))
        k, v = rng.normal(size=(2, 1024, kv_heads, dim))
        held = np.full((2, LAYERS, SLOTS, kv_heads, dim), np.nan)
        for row, length in enumerate(batch.prefix_lens):  # NaN in all slots that hold nothing
            slots = [batch.page_table[row, i // PAGE] * PAGE + i % PAGE for i in range(length)]
            held[:, 1, slots] = rng.normal(size=(2, length, kv_heads, dim))
        rows, count = slice(0, batch.num_tokens), len(batch.score_rows)
        expected = oracle(batch, PAGE, q[rows], k[rows], v[rows], held[0, 1], held[1, 1], window)
        if flawed:
            row, request = int(rng.integers(batch.num_tokens)), int(batch.prefix_lens.argmax())
            slot = batch.page_table[request, 0] * PAGE
            k[row], v[row], held[0, 1, slot], held[1, 1, slot] = np.nan, 0, np.nan, 0
            of = np.repeat(batch.request_of, np.diff(batch.cu_seqlens))
            expected[visible_rows(batch)[:, row] | (of == request)] = np.nan
        joined = heads_of(shape).joined(*held.reshape(2, -1, kv_heads, dim).astype(np.float32))
        every, scored = run(
            padded(batch, SIZES, PAGE, statistics=0),
            Pool(joined.reshape(LAYERS, -1, PAGE, joined.shape[1])),
            np.int32(window or EVERYTHING),
            *(x.astype(np.float32) for x in (q, k, v)),
            windowed=window is not None,
            name=name,
            shape=shape,
        )
        return (every[rows], expected), (scored[:count], expected[batch.score_rows])

    return make


@pytest.mark.parametrize(
    ("name", "window", "shape"),
    [
        *(("xla", None, PLAIN), ("pallas", None, TOGETHER)),
        *slow(("xla", 9, PLAIN), ("xla", None, TOGETHER), ("xla", 9, PADDED)),
        *slow(("pallas", None, PLAIN), ("pallas", 9, TOGETHER), ("pallas", None, PADDED)),
    ],
)
def test_against_the_oracle(attention, name, window, shape):
    """Several requests share a tile, with and without prefix; segments are long and form trees."""
    for seed in range(4):
        for got, expected in attention(seed, window, name, shape):
            np.testing.assert_allclose(got, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("name", "shape"), [("xla", PLAIN), ("pallas", PADDED)])
def test_a_flawed_key_reaches_the_rows_that_see_it_and_no_other(attention, name, shape):
    for seed in range(3):
        for got, expected in attention(seed, None, name, shape, flawed=True):
            assert np.isnan(expected).any()
            assert np.isfinite(expected).any()
            np.testing.assert_allclose(got, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_that_fill_tiles_are_rotated_alike(dtype):
    """Compares a TPU's path, head by head, with all heads at once."""
    import jax.numpy as jnp

    from gpuscore.backends.jax.rotary import norm_and_rotate_heads, rotary_tables, sliced
    from support.attention_inputs import heads_alone

    config, rng = heads_alone(3, 1, 16), np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(9, 48)), dtype)
    weight = jnp.asarray(rng.normal(size=16), dtype)
    rotary = sliced(rotary_tables(jnp.arange(5, 14), config), 0, 9)
    for norm in (weight, None):
        expected, got = (norm_and_rotate_heads(x, norm, rotary, config, lanes) for lanes in (1, 16))
        assert got.shape == (9, 3, 16)
        np.testing.assert_allclose(
            got.astype(jnp.float32), expected.astype(jnp.float32), atol=1e-6, rtol=0
        )
