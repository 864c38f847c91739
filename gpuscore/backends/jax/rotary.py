"""Norms, and the rotary embedding of heads."""

import math
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.ropes import Llama3Rope, Rope, YarnRope
from gpuscore.backends.jax.products import part
from gpuscore.types.batch import Float32Array

Rotary: TypeAlias = tuple[Array, Array]  # cos and sin, float32 [T, D / 2]


def sliced(rotary: Rotary, start: Array, size: int) -> Rotary:
    """Return the tables of `size` rows from `start` on, [size, 1, D / 2]."""
    cos, sin = (part(table, start, size)[:, None] for table in rotary)
    return cos, sin


def rotary_tables(positions: Array, cfg: DecoderConfig) -> Rotary:
    frequencies = inverse_frequencies(cfg.rope, cfg.head_dim)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def inverse_frequencies(rope: Rope, head_dim: int) -> Float32Array:
    """Frequencies of the rotary embedding's pairs, float32 [D / 2]."""
    exponent = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    frequencies = (1.0 / (np.float32(rope.theta) ** exponent)).astype(np.float32)
    if isinstance(rope.scaling, Llama3Rope):
        return _llama3_scaled(frequencies, rope.scaling)
    if isinstance(rope.scaling, YarnRope):
        kept = rope.scaling.unscaled_weights(rope.theta, head_dim)
        return frequencies / np.float32(rope.scaling.factor) * (1 - kept) + frequencies * kept
    return frequencies / np.float32(rope.scaling or 1)


def _llama3_scaled(frequencies: Float32Array, rope: Llama3Rope) -> Float32Array:
    """Scale as Llama 3.1: divide low frequencies by `factor`, keep high ones, ramp between."""
    turns = rope.original_max_position_embeddings / (np.float32(2 * math.pi) / frequencies)
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp = ramp.clip(0, 1)
    return (frequencies * (ramp + (1 - ramp) / rope.factor)).astype(np.float32)


def rms_norm(x: Array, weight: Array, cfg: DecoderConfig) -> Array:
    """RMS norm over the last dimension in float32, rounded once to the weight's dtype."""
    return wide_norm(x, weight, cfg).astype(weight.dtype)


def wide_norm(x: Array, weight: Array, cfg: DecoderConfig) -> Array:
    """Return the norm before it is rounded, float32."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + cfg.rms_norm_eps)
    return weight.astype(jnp.float32) * normed


def by_head(x: Array, cfg: DecoderConfig) -> Array:
    return x.reshape(len(x), -1, cfg.head_dim)


def norm_and_rotate_heads(
    x: Array, weight: Array | None, rotary: Rotary, cfg: DecoderConfig, lanes: int
) -> Array:
    """Norm and rotate each head of x [M, heads * D] -> [M, heads, D].

    On a TPU, heads that fill whole tiles are computed one by one, without a copy. To compute all at
    once, XLA would first copy them to make heads a dimension of the tiles. By its own estimate the
    copy takes longer than the layer's matrix products.
    """
    if lanes == 1 or cfg.head_dim % lanes:
        return norm_and_rotate(by_head(x, cfg), weight, rotary, cfg)
    cos, sin = (table[:, 0] for table in rotary)
    heads = jnp.split(x, x.shape[1] // cfg.head_dim, axis=1)
    done = [norm_and_rotate(head, weight, (cos, sin), cfg) for head in heads]
    return by_head(jnp.concatenate(done, axis=1), cfg)


def norm_and_rotate(x: Array, weight: Array | None, rotary: Rotary, cfg: DecoderConfig) -> Array:
    """Norm x [M, heads, D] or [M, D] if there is a QK norm, then rotate pairs (i, i + D / 2)."""
    cos, sin = rotary
    wide = x.astype(jnp.float32) if weight is None else wide_norm(x, weight, cfg)
    left, right = jnp.split(wide, 2, axis=-1)
    rotated = (left * cos - right * sin, right * cos + left * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
