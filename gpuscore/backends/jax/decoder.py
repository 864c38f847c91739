"""The decoder of Llama-like models as pure functions over trees of weights.

T rows, M rows of a tile, N scored rows, E hidden size, I size of the MLP, H heads, D head size.
docs/explanation/rounding.md lists the rounding points.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gpuscore.arrays import Float32Array
from gpuscore.backends.common.hf_config import DecoderConfig, Llama3Rope, Rope
from gpuscore.backends.jax.attention import Pool
from gpuscore.backends.jax.indexing import chosen, part, put
from gpuscore.backends.jax.layout import Tile, Tiles
from gpuscore.backends.jax.products import Quantized, linear, rows_of

EVERYTHING = 1 << 30  # the window of a layer without one
State: TypeAlias = tuple[Array, Pool]
Rotary: TypeAlias = tuple[Array, Array]  # cos and sin, float32 [T, 1, D / 2]


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
    lm_head: Array  # [V, E]; the embedding itself where they are tied, or [classes, E]


class Attend(Protocol):
    """Attention of one batch."""

    @property
    def every(self) -> Tiles: ...

    @property
    def scored(self) -> Tiles: ...

    def store(self, pool: Pool, layer: Array, k: Array, v: Array) -> Pool:
        """Return the pool with k and v [T, Hkv, D] of the rows that are kept."""

    def __call__(
        self, tile: Tile, pool: Pool, layer: Array, window: Array, q: Array, k: Array, v: Array
    ) -> Array:
        """Attend: q [M, H, D] of a tile's rows, k and v [T, Hkv, D] of all rows -> [M, H, D]."""


def forward(
    tokens: Array,
    positions: Array,
    weights: Weights,
    cfg: DecoderConfig,
    attend: Attend,
    pool: Pool,
) -> tuple[Array, Pool]:
    """Return hidden states [T, E] after the final norm, scored rows first, and the pool.

    Each layer computes keys and values of every row, because later batches may read them. Queries,
    attention and MLP are computed for every row too, but in the last layer for scored rows only.
    """
    with jax.named_scope("embed"):
        x = chosen(weights.embed, tokens)
    rotary = rotary_tables(positions, cfg)
    windows = jnp.array([window or EVERYTHING for window in cfg.windows], jnp.int32)
    scores = jnp.arange(cfg.num_layers) == cfg.num_layers - 1

    def one_layer(state: State, given: tuple[Layer, Array, Array, Array]) -> tuple[State, None]:
        (x, pool), (layer, index, window, scoring) = state, given

        def of_tile(tile: Tile) -> tuple[Array, Rotary]:
            cos, sin = (chosen(table, tile.rows.place) for table in rotary)
            return chosen(x, tile.rows.place), (cos, sin)

        def kept(tile: Tile) -> tuple[Array, Array]:
            rows, turned = (
                jax.tree.map(lambda t: chosen(t, tile.rows.place), t) for t in (x, rotary)
            )
            return keys_values(layer, input_norm(layer, rows, cfg), turned, cfg)

        def after(tile: Tile) -> Array:
            rows, turned = (
                jax.tree.map(lambda t: chosen(t, tile.rows.place), t) for t in (x, rotary)
            )
            q = queries(layer, input_norm(layer, rows, cfg), turned, cfg)
            out = attend(tile, pool, index, window, q, k, v)
            return after_attention(layer, rows, out, cfg)

        k, v = tile_by_tile(attend.every, kept)
        pool = attend.store(pool, index, k, v)
        tiles = jax.tree.map(partial(jnp.where, scoring), attend.scored, attend.every)
        return (tile_by_tile(tiles, after), pool), None

    given = (weights.layers, jnp.arange(cfg.num_layers), windows, scores)
    (x, pool), _ = lax.scan(one_layer, (x, pool), given)
    with jax.named_scope("final_norm"):
        return rms_norm(x, weights.final_norm, cfg.rms_norm_eps), pool


def tile_by_tile(tiles: Tiles, run: Callable[[Tile], Any]) -> Any:
    """Call `run` on each tile and stack the arrays [rows, ...] it returns; 0 after the last one."""
    count = len(tiles.bounds.position)
    size = len(tiles.rows.place) // count

    def tile(index: Array) -> Tile:
        rows = jax.tree.map(lambda values: part(values, index * size, size), tiles.rows)
        return Tile(rows, jax.tree.map(lambda bound: part(bound, index, 1)[0], tiles.bounds))

    def one(index: Array, done: Any) -> Any:
        return jax.tree.map(
            lambda every, new: put(every, new, index * size), done, run(tile(index))
        )

    shapes = jax.eval_shape(run, jax.eval_shape(tile, jnp.int32(0)))
    none = jax.tree.map(lambda new: jnp.zeros((count * size, *new.shape[1:]), new.dtype), shapes)
    return lax.fori_loop(0, tiles.number, one, none)


def input_norm(layer: Layer, x: Array, cfg: DecoderConfig) -> Array:
    with jax.named_scope("norm"):
        return rms_norm(x, layer.input_norm, cfg.rms_norm_eps)


def queries(layer: Layer, normed: Array, rotary: Rotary, cfg: DecoderConfig) -> Array:
    """Return rotated queries [M, H, D]."""
    with jax.named_scope("queries"):
        size = cfg.num_heads * cfg.head_dim
        bias = None if layer.qkv_bias is None else layer.qkv_bias[:size]
        q = by_head(linear(normed, rows_of(layer.qkv, 0, size), bias), cfg)
        return norm_and_rotate(q, layer.q_norm, rotary, cfg)


def keys_values(
    layer: Layer, normed: Array, rotary: Rotary, cfg: DecoderConfig
) -> tuple[Array, Array]:
    """Return k and v [M, Hkv, D] of a tile's rows, k rotated."""
    with jax.named_scope("keys_values"):
        size = cfg.num_heads * cfg.head_dim
        bias = None if layer.qkv_bias is None else layer.qkv_bias[size:]
        k, v = jnp.split(by_head(linear(normed, rows_of(layer.qkv, size), bias), cfg), 2, axis=1)
        return norm_and_rotate(k, layer.k_norm, rotary, cfg), v


def after_attention(layer: Layer, x: Array, out: Array, cfg: DecoderConfig) -> Array:
    """Return the residual stream after output projection and MLP; `out` is [M, H, D]."""
    with jax.named_scope("output"):
        x = x + linear(out.reshape(len(out), -1), layer.o, layer.o_bias)
    with jax.named_scope("mlp"):
        normed = rms_norm(x, layer.mlp_norm, cfg.rms_norm_eps)
        gate, up = jnp.split(linear(normed, layer.gate_up, layer.gate_up_bias), 2, axis=1)
        activated = jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype)
        return x + linear(activated * up, layer.down, layer.down_bias)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMS norm over the last dimension: computed in float32, rounded, then times the weight."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return weight * normed.astype(x.dtype)


def by_head(x: Array, cfg: DecoderConfig) -> Array:
    return x.reshape(len(x), -1, cfg.head_dim)


def norm_and_rotate(x: Array, weight: Array | None, rotary: Rotary, cfg: DecoderConfig) -> Array:
    """Norm each head of x [M, heads, D] if there is a QK norm, then rotate pairs (i, i + D / 2)."""
    if weight is not None:
        x = rms_norm(x, weight, cfg.rms_norm_eps)
    cos, sin = rotary
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (left * cos - right * sin, right * cos + left * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def rotary_tables(positions: Array, cfg: DecoderConfig) -> Rotary:
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(cfg.rope, cfg.head_dim)
    return jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]


def inverse_frequencies(rope: Rope, head_dim: int) -> Float32Array:
    """Frequencies of the rotary embedding's pairs, float32 [D / 2]."""
    exponent = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    frequencies = (1.0 / (np.float32(rope.theta) ** exponent)).astype(np.float32)
    if isinstance(rope.scaling, Llama3Rope):
        return _llama3_scaled(frequencies, rope.scaling)
    return frequencies / np.float32(rope.scaling or 1)


def _llama3_scaled(frequencies: Float32Array, rope: Llama3Rope) -> Float32Array:
    """Scale as Llama 3.1: low frequencies are divided by `factor`, high ones kept, with a ramp."""
    turns = rope.original_max_position_embeddings / (np.float32(2 * math.pi) / frequencies)
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp = ramp.clip(0, 1)
    return (frequencies * (ramp + (1 - ramp) / rope.factor)).astype(np.float32)
