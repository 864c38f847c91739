"""Pure functions of the decoder. Shapes: T rows, E hidden size, H heads, D head size.

Rounding points are the same for every dtype: norms and the rotary embedding compute in float32 and
round their result once; projections and the residual stream stay in the model's dtype.
"""

import math

import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import Llama3Rope, Rope
from gpuscore_kernels.add_rms_norm.reference import rms_norm
from gpuscore_kernels.gated.reference import gated
from gpuscore_kernels.qk_norm_rope_store import qk_norm_rope_store

__all__ = [
    "add_and_norm",
    "gated",
    "inverse_frequencies",
    "norm_and_rotate",
    "rms_norm",
    "rotary_tables",
]


def add_and_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, one_plus: bool
) -> tuple[Tensor, Tensor]:
    """Return the residual stream x + delta [T, E], and its norm."""
    x = x + delta
    return x, rms_norm(x, weight, eps, one_plus)


def norm_and_rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    one_plus: bool,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a QKV product [T, (H + 2 Hkv) D] into q [T, H, D], k and v [T, Hkv, D].

    Queries and keys are normed if the model has a QK norm, and rotated by cos and sin [T, D / 2].
    """
    return qk_norm_rope_store(
        qkv,
        cos,
        sin,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        one_plus=one_plus,
        impl="reference",
    )


def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """Frequencies of the rotary embedding's pairs, float32 [D / 2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponent)
    if isinstance(rope.scaling, Llama3Rope):
        frequencies = _llama3_scaled(frequencies, rope.scaling)
    elif rope.scaling is not None:
        frequencies = frequencies / rope.scaling
    return frequencies.to(device)


def _llama3_scaled(frequencies: Tensor, rope: Llama3Rope) -> Tensor:
    """Scale as Llama 3.1: low frequencies are divided by `factor`, high ones kept, with a ramp."""
    wavelength = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelength
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return frequencies * (ramp + (1 - ramp) / rope.factor)


def rotary_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [T, D / 2]."""
    angles = positions.float().unsqueeze(1) * frequencies
    return angles.cos(), angles.sin()
