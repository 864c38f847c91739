"""The decoder of Llama-like models as pure functions over trees of weights.

T rows, M rows of a tile, N scored rows, E hidden size, I size of the MLP, H heads, D head size.
docs/explanation/rounding.md lists the rounding points.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.jax.attention import LayerKeys, Pool
from gpuscore.backends.jax.layout import Chosen, TileSizes, product_tiles
from gpuscore.backends.jax.products import (
    Quantized,
    chosen,
    linear,
    one_of,
    part,
    put,
    rows_of,
)
from gpuscore.backends.jax.rotary import (
    Rotary,
    by_head,
    norm_and_rotate_heads,
    rms_norm,
    rotary_tables,
    sliced,
)

EVERYTHING = 1 << 30  # the window of a layer without one


class Layer(NamedTuple):
    """Weights of one layer, or of all layers with one more dimension in front."""

    input_norm: Array  # [E]
    qkv: Array | Quantized  # [(H + 2 Hkv) D, E]: q rows, then k, then v
    qkv_bias: Array | None
    q_norm: Array | None  # [D]
    k_norm: Array | None
    o: Array | Quantized  # [E, H D]
    o_bias: Array | None
    mlp_norm: Array  # [E]
    gate_up: Array | Quantized  # [2 I, E]
    gate_up_bias: Array | None
    down: Array | Quantized  # [E, I]
    down_bias: Array | None


class Weights(NamedTuple):
    embed: Array  # [V, E]
    layers: Layer  # of all layers
    final_norm: Array  # [E]
    # [V, E]; the embedding itself where they are tied, or [classes, E] or [classes, E + 8] with a
    # bias in column E, for which rows end with ones.
    lm_head: Array
    head_inner: Array | None = None  # [E, E], of a head of two layers, the first
    head_inner_bias: Array | None = None


class Batch(Protocol):
    """Attention of one batch, over buffers that all layers share."""

    @property
    def every(self) -> Chosen: ...

    @property
    def scored(self) -> Chosen: ...

    @property
    def tiling(self) -> TileSizes: ...

    @property
    def lanes(self) -> int:
        """Columns of the tiles in which the device stores arrays; 1 if it has none."""

    def buffers(self, dtype: jnp.dtype) -> tuple[Array, Array]:
        """Return memory for queries and outputs of all rows, and for their keys and values."""

    def put_queries(self, buffer: Array, q: Array, start: Array) -> Array:
        """Return the buffer with q [M, H, D] of rows from `start` on."""

    def put_keys(self, buffer: Array, k: Array, v: Array, start: Array) -> Array:
        """Return the buffer with k and v [M, Hkv, D] of rows from `start` on."""

    def store(self, pool: Pool, layer: Array, kv: Array) -> Pool:
        """Return the pool with keys and values of the rows that are kept."""

    def attend(self, chosen: Chosen, keys: LayerKeys, q: Array) -> Array:
        """Return buffer `q`, in which outputs have taken the place of the chosen rows' queries."""

    def outputs(self, buffer: Array, start: Array, rows: int) -> Array:
        """Return the outputs [M, H * D] of `rows` rows from `start` on."""


class State(NamedTuple):
    """The data that layers hand on; each is updated in place."""

    x: Array  # float32 [T, E]
    q: Array  # see `Batch.buffers`
    kv: Array
    pool: Pool


def forward(
    tokens: Array,
    positions: Array,
    weights: Weights,
    cfg: DecoderConfig,
    batch: Batch,
    pool: Pool,
) -> tuple[Array, Pool]:
    """Return hidden states of scored rows, [T, E] as the label head takes them, and the pool.

    The residual stream is float32.

    Each layer computes keys and values of every row, because later batches may read them. Queries,
    attention and MLP are computed for every row too, but in the last layer for scored rows only.
    """
    with jax.named_scope("embed"):
        x = chosen(weights.embed, tokens).astype(jnp.float32)
    rotary = rotary_tables(positions, cfg)
    windows = jnp.array([window or EVERYTHING for window in cfg.windows], jnp.int32)
    last = cfg.num_layers - 1

    def one_layer(index: Array, state: State) -> State:
        layer = jax.tree.map(lambda w: part(w, index, 1)[0], weights.layers)
        state = with_queries_and_keys(layer, state, batch, rotary, cfg=cfg)
        pool = batch.store(state.pool, index, state.kv)
        keys = LayerKeys(pool, index, one_of(windows, index), state.kv)
        q = batch.attend(batch.every, keys, state.q)
        x = with_outputs(layer, state.x, q, batch, rows=batch.every, cfg=cfg)
        return state._replace(x=x, q=q, pool=pool)

    state = State(x, *batch.buffers(weights.embed.dtype), pool)
    state = lax.fori_loop(0, last, one_layer, state)
    with jax.named_scope("last_layer"):
        layer, index = jax.tree.map(lambda w: w[last], weights.layers), jnp.int32(last)
        kv = with_keys(layer, state, batch, rotary, cfg=cfg)
        pool = batch.store(state.pool, index, kv)
        x, q = scored_queries(layer, state, batch, cfg)
        q = batch.attend(batch.scored, LayerKeys(pool, index, windows[last], kv), q)
        x = with_outputs(layer, x, q, batch, rows=batch.scored, cfg=cfg, weights=weights)
        width = weights.lm_head.shape[1] - cfg.hidden_size
        x = jnp.pad(x, ((0, 0), (0, width)), constant_values=1) if width else x
        return x.astype(weights.embed.dtype), pool


def by_tiles(
    tiling: TileSizes, rows: Array, run: Callable[[Array, int, Any], Any], state: Any
) -> Any:
    """Call `run` with the first row and the size of each tile, and with the state it returned."""
    for size, (first, count) in zip(tiling.product_rows, product_tiles(rows, tiling), strict=True):

        def one(index: Array, state: Any, first: Any = first, size: int = size) -> Any:
            return run(first + index * size, size, state)

        state = lax.fori_loop(0, count, one, state)
    return state


def with_queries_and_keys(
    layer: Layer, state: State, batch: Batch, rotary: Rotary, cfg: DecoderConfig
) -> State:
    """Compute queries, keys and values of all rows."""

    def of_tile(start: Array, size: int, buffers: tuple[Array, Array]) -> tuple[Array, Array]:
        normed = input_norm(layer, part(state.x, start, size), cfg)
        q, k, v = projected(layer, normed, sliced(rotary, start, size), cfg, lanes=batch.lanes)
        q_buffer = batch.put_queries(buffers[0], q, start)
        return q_buffer, batch.put_keys(buffers[1], k, v, start)

    q, kv = by_tiles(batch.tiling, batch.every[1], of_tile, (state.q, state.kv))
    return state._replace(q=q, kv=kv)


def with_keys(
    layer: Layer, state: State, batch: Batch, rotary: Rotary, cfg: DecoderConfig
) -> Array:
    """Compute keys and values of all rows."""

    def of_tile(start: Array, size: int, buffer: Array) -> Array:
        normed = input_norm(layer, part(state.x, start, size), cfg)
        k, v = keys_values(layer, normed, sliced(rotary, start, size), cfg, lanes=batch.lanes)
        return batch.put_keys(buffer, k, v, start)

    return by_tiles(batch.tiling, batch.every[1], of_tile, state.kv)


def scored_queries(
    layer: Layer, state: State, batch: Batch, cfg: DecoderConfig
) -> tuple[Array, Array]:
    """Return the scored rows of x, and the buffer with their queries."""
    tiles, count = batch.scored
    rotary = rotary_tables(tiles.rows.position, cfg)

    def of_tile(start: Array, size: int, buffers: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = chosen(state.x, part(tiles.rows.place, start, size))
        normed, turned = input_norm(layer, rows, cfg), sliced(rotary, start, size)
        q = queries(layer, normed, turned, cfg, lanes=batch.lanes)
        return put(buffers[0], rows, start), batch.put_queries(buffers[1], q, start)

    return by_tiles(batch.tiling, count, of_tile, (jnp.zeros_like(state.x), state.q))


def final_norm(weights: Weights, x: Array, cfg: DecoderConfig) -> Array:
    """Return the norm of x, after the inner layer of a head that has one."""
    with jax.named_scope("final_norm"):
        normed = rms_norm(x, weights.final_norm, cfg)
        if weights.head_inner is None:
            return normed
        return jax.nn.relu(linear(normed, weights.head_inner, weights.head_inner_bias))


def with_outputs(
    layer: Layer,
    x: Array,
    q: Array,
    batch: Batch,
    rows: Chosen,
    cfg: DecoderConfig,
    weights: Weights | None = None,
) -> Array:
    """Return x after attention and MLP of its rows; with all weights, also normed.

    `q` is the buffer with outputs of attention.
    """

    def of_tile(start: Array, size: int, x: Array) -> Array:
        attended = batch.outputs(q, start, size)
        done = after_attention(layer, part(x, start, size), attended, cfg)
        if weights is not None:
            done = final_norm(weights, done, cfg)
        return put(x, done.astype(x.dtype), start)

    return by_tiles(batch.tiling, rows[1], of_tile, x)


def input_norm(layer: Layer, x: Array, cfg: DecoderConfig) -> Array:
    with jax.named_scope("norm"):
        return rms_norm(x, layer.input_norm, cfg)


def queries(layer: Layer, normed: Array, rotary: Rotary, cfg: DecoderConfig, lanes: int) -> Array:
    """Return rotated queries [M, H, D]."""
    with jax.named_scope("queries"):
        size = cfg.num_heads * cfg.head_dim
        bias = None if layer.qkv_bias is None else layer.qkv_bias[:size]
        q = linear(normed, rows_of(layer.qkv, 0, size), bias)
        return norm_and_rotate_heads(q, layer.q_norm, rotary, cfg, lanes=lanes)


def projected(
    layer: Layer, normed: Array, rotary: Rotary, cfg: DecoderConfig, lanes: int
) -> tuple[Array, Array, Array]:
    """Return q [M, H, D], k and v [M, Hkv, D] of a tile's rows, q and k rotated."""
    with jax.named_scope("queries_keys_values"):
        size, of_keys = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        both = linear(normed, layer.qkv, layer.qkv_bias)
        q, k, v = jnp.split(both, (size, size + of_keys), axis=1)
        q = norm_and_rotate_heads(q, layer.q_norm, rotary, cfg, lanes=lanes)
        k = norm_and_rotate_heads(k, layer.k_norm, rotary, cfg, lanes=lanes)
        return q, k, by_head(v, cfg)


def keys_values(
    layer: Layer, normed: Array, rotary: Rotary, cfg: DecoderConfig, lanes: int
) -> tuple[Array, Array]:
    """Return k and v [M, Hkv, D] of a tile's rows, k rotated."""
    with jax.named_scope("keys_values"):
        size = cfg.num_heads * cfg.head_dim
        bias = None if layer.qkv_bias is None else layer.qkv_bias[size:]
        k, v = jnp.split(linear(normed, rows_of(layer.qkv, size), bias), 2, axis=1)
        k = norm_and_rotate_heads(k, layer.k_norm, rotary, cfg, lanes=lanes)
        return k, by_head(v, cfg)


def after_attention(layer: Layer, x: Array, out: Array, cfg: DecoderConfig) -> Array:
    """Return the residual stream after output projection and MLP; `out` is [M, H * D]."""
    with jax.named_scope("output"):
        x = x + linear(out, layer.o, layer.o_bias).astype(jnp.float32)
    with jax.named_scope("mlp"):
        normed = rms_norm(x, layer.mlp_norm, cfg)
        gate, up = jnp.split(linear(normed, layer.gate_up, layer.gate_up_bias), 2, axis=1)
        wide, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        activated = (jax.nn.silu(wide) * up).astype(normed.dtype)
        return x + linear(activated, layer.down, layer.down_bias).astype(jnp.float32)
