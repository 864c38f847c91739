"""A check at start that attention and page writes follow the mask rule on this device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.known_answer import TOLERANCE, by_the_rule, check_error, known_batch
from gpuscore.backends.jax.attention import Attend, Attention, Pool, store
from gpuscore.backends.jax.decoder import EVERYTHING
from gpuscore.backends.jax.heads import Heads
from gpuscore.backends.jax.layout import ProgramSizes, divided
from gpuscore.backends.jax.padding import padded
from gpuscore.errors import ConfigError

LAYER, LAYERS = 1, 2  # number of the layer that is written and read, and count of layers
TOKENS = 128  # rows of the batch at most


def check_known_answer(
    name: str,
    attends: Attend,
    model: DecoderConfig,
    heads: Heads,
    dtype: str,
    device: jax.Device,
    sizes: ProgramSizes,
    page_size: int,
) -> None:
    """Raise ConfigError if attention gives another answer than the mask rule.

    Args:
        name: of the attention, for the error.
        attends: the attention.
        model: its configuration; one layer of each window is computed.
        heads, dtype, device, page_size: of keys and values.
        sizes: of a program with room for TOKENS rows.
    """
    batch, rng = known_batch(page_size), np.random.default_rng(0)
    slots, rows = batch.page_table.size * page_size, batch.num_tokens
    attention = Attention(model.attention_scale, heads, sizes.tiling, any(model.windows))
    run = jax.jit(partial(_run, attention, attends, sizes))

    def drawn(*shape: int) -> Array:
        values = rng.standard_normal(shape, np.float32)
        return jax.device_put(jnp.asarray(values, jnp.dtype(dtype)), device)

    for window in dict.fromkeys(model.windows):
        cached = [drawn(LAYERS * slots, heads.kv, heads.dim) for _ in range(2)]
        q, k, v = (drawn(sizes.tokens, n, heads.dim) for n in (heads.query, heads.kv, heads.kv))
        pages = heads.joined(*cached).reshape(LAYERS, -1, page_size, 2 * heads.width)
        held = [_exact(side)[LAYER * slots :] for side in cached]
        buffer = padded(batch, sizes, page_size, wanted=0)
        results = run(buffer, Pool(pages), np.int32(window or EVERYTHING), q, k, v)
        every, scored, kept = (_exact(x) for x in results)
        own = [_exact(x)[:rows] for x in (q, k, v)]
        expected = by_the_rule(batch, page_size, window, model.attention_scale, None, held, own)
        _compare(name, dtype, every[:rows], expected)
        _compare(name, dtype, scored[: len(batch.score_rows)], expected[batch.score_rows])
        written = batch.slot_mapping >= 0
        for side, new in zip(held, own[1:], strict=True):
            side[batch.slot_mapping[written]] = new[written]
        if not np.array_equal(kept.reshape(2, slots, heads.kv, -1), np.stack(held)):
            raise ConfigError(
                f"--backend jax writes other keys and values than it computed to its pages on "
                f"{device.device_kind}; this is a defect of JAX {jax.__version__} there"
            )


def _run(
    attention: Attention,
    attends: Attend,
    sizes: ProgramSizes,
    buffer: Array,
    pool: Pool,
    window: Array,
    q: Array,
    k: Array,
    v: Array,
) -> tuple[Array, Array, Array]:
    """Return outputs of all rows and of scored rows, and the layer's pages afterwards."""
    heads, tables, layer = attention.heads, divided(buffer, sizes), jnp.int32(LAYER)
    kv = jnp.pad(heads.joined(k, v), ((attention.front,) * 2, (0, 0)))
    pool = store(attention, tables, pool, layer, kv)
    outputs = []
    for tiles, count in (
        (tables.every, tables.numbers.rows[0]),
        (tables.scored, tables.numbers.scored[0]),
    ):
        rows = attends.form(heads, q[tiles.rows.place])
        out = attends(attention, tables, tiles, count, pool, layer, window, rows, kv)
        outputs.append(attends.plain(heads, out).reshape(q.shape))
    kept = heads.parts(pool.pages[LAYER].reshape(-1, 2 * heads.width))
    return outputs[0], outputs[1], jnp.stack(kept)


def _exact(x: Array) -> NDArray[np.float64]:
    return np.asarray(x.astype(jnp.float32)).astype(np.float64)


def _compare(
    name: str, dtype: str, got: NDArray[np.float64], expected: NDArray[np.float64]
) -> None:
    error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    check_error(f"--attention {name}", "", error, TOLERANCE[dtype])
