"""Tables of the rotary position embedding."""

import math
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array

from gpuscore.backends.common.hf_config import DecoderConfig, Llama3Rope, Rope
from gpuscore.backends.jax.indexing import part
from gpuscore.types.arrays import Float32Array

Rotary: TypeAlias = tuple[Array, Array]  # cos and sin, float32 [T, D / 2]


def sliced(rotary: Rotary, start: Array, size: int) -> Rotary:
    """Return the tables of `size` rows from `start` on, [size, 1, D / 2]."""
    cos, sin = (part(table, start, size)[:, None] for table in rotary)
    return cos, sin


def rotary_tables(positions: Array, cfg: DecoderConfig) -> Rotary:
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(cfg.rope, cfg.head_dim)
    return jnp.cos(angles), jnp.sin(angles)


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
