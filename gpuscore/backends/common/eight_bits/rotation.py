"""Rotation of a model's hidden states, folded into its weights before they are rounded to INT8.

A row has one scale, so a few large channels cost all others their bits. Rotated by an orthogonal
matrix, all channels are of one size, and the model computes the same: the norms' weights move into
the layers that read their rows, and RMS itself does not change with a rotation (QuaRot, Ashkboos et
al., 2024). Every sum is done in a fixed order, so all machines and backends get the same bits.
"""

import hashlib
import math
from collections.abc import Collection

import numpy as np

from gpuscore.backends.common.architectures import Architecture
from gpuscore.types.batch import Float32Array

# Layers that read rows of the stream, with the norm before them, and layers that add to it.
READS = {
    **dict.fromkeys(("q", "k", "v"), "input_norm"),
    **dict.fromkeys(("gate", "up"), "mlp_norm"),
}
READERS = {"q", "gate", "up"}  # the groups of those that read
WRITES = ("o", "down", "o_bias", "down_bias")
NUMBERS = 2**18  # that are rotated at once, so that they stay in a core's cache


def is_rotated(architecture: Architecture, precision: str, kept: Collection[str] = ()) -> bool:
    """True if a model's hidden states are rotated.

    Not rotated are mixtures of experts, and models that apply a norm's weight to a layer's output
    before it is added to the hidden states. Nor is a model rotated if the `GROUPS` that read hidden
    states stay in 16 bits (`kept`): these products are more exact without a rotation, because
    floating-point numbers keep large channels apart.
    """
    config, parts = architecture.config, architecture.layer_weights[0]
    return (
        precision == "int8"
        and architecture.storage is None
        and config.mixture is None
        and "post_attention_norm" not in parts
        and not set(kept) >= READERS
    )


def rotation_bytes(architecture: Architecture, precision: str) -> int:
    """Return the bytes of the matrix; 0 for a model that is not rotated."""
    return 4 * architecture.config.hidden_size**2 * is_rotated(architecture, precision)


def rotation(width: int) -> Float32Array:
    """Return the matrix R [E, E] with which rows of hidden states are multiplied, x R."""
    return rotated(np.eye(width, dtype=np.float32))


def folded(part: str, tensor: Float32Array, norm: Float32Array | None) -> Float32Array:
    """Return a weight [O, K] or bias [O] that reads or adds to rotated hidden states.

    Args:
        part: that it is.
        tensor: as it is stored, in float32.
        norm: what the norm before it multiplies rows with, [K]; None if it does not read the
            stream.
    """
    if norm is not None:
        return rotated(tensor * norm)
    return np.ascontiguousarray(rotated(np.ascontiguousarray(tensor.T)).T)


def rotated(rows: Float32Array) -> Float32Array:
    """Return rows [N, E] or [E] times R: signs, a Hadamard and a cosine transform."""
    width = rows.shape[-1]
    flat, some = rows.reshape(-1, width), max(1, NUMBERS // width)
    signs, cosines = _signs(width), _cosines(width // (width & -width))
    parts = [_transformed(flat[i : i + some] * signs, cosines) for i in range(0, len(flat), some)]
    return np.concatenate(parts).reshape(rows.shape)


def _transformed(rows: Float32Array, cosines: Float32Array) -> Float32Array:
    odd, count = len(cosines), len(rows)
    power = rows.shape[1] // odd
    half = 1
    while half < power:  # Sylvester's Hadamard matrix, as adds of halves
        pairs = rows.reshape(count, -1, 2, half)
        left, right = pairs[:, :, 0], pairs[:, :, 1]
        rows, half = np.stack((left + right, left - right), axis=2), 2 * half
    blocks = rows.reshape(count, odd, power) * np.float32(power**-0.5)
    if odd > 1:
        out = blocks[:, :1] * cosines[:, 0, None]
        for index in range(1, odd):
            out += blocks[:, index, None] * cosines[:, index, None]
        blocks = out
    return blocks.reshape(count, -1)


def _cosines(size: int) -> Float32Array:
    """Return the orthogonal matrix of the discrete cosine transform of type 2, [size, size]."""
    rows = [[math.cos(math.pi / size * (j + 0.5) * i) for j in range(size)] for i in range(size)]
    scales = [math.sqrt((1 if i == 0 else 2) / size) for i in range(size)]
    cosines: Float32Array = (np.array(rows) * np.array(scales)[:, None]).astype(np.float32)
    return cosines


def _signs(width: int) -> Float32Array:
    """Return signs [E], half of them negative; without them, a mean would be one large channel."""
    bits = np.unpackbits(np.frombuffer(hashlib.shake_256(b"signs").digest(width), np.uint8))[:width]
    return np.float32(1) - 2 * bits.astype(np.float32)
