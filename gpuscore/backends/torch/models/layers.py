"""Pure functions that the decoders are made of. Shapes: T rows, E hidden, H heads, D head size.

Rounding points, the same for every dtype: norms and the rotary embedding compute in float32 and
round once on the way out; projections and the residual stream stay in the model's dtype.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore.backends.torch.hf_config import DecoderConfig, Llama3Rope


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., E], weight [E]; rounds before it applies the weight, as transformers does."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def swiglu_mlp(
    x: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None
) -> Tensor:
    """x [T, E]; gate_up [2I, E] holds the gate's rows, then the up projection's."""
    gate, up = functional.linear(x, gate_up, gate_up_bias).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down, down_bias)


def inverse_frequencies(config: DecoderConfig, device: torch.device) -> Tensor:
    """float32 [D / 2]."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponent)
    if config.rope_scaling is not None:
        frequencies = _llama3_scaled(frequencies, config.rope_scaling)
    return frequencies.to(device)


def _llama3_scaled(frequencies: Tensor, rope: Llama3Rope) -> Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, between them a ramp."""
    wavelength = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelength
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return frequencies * (ramp + (1 - ramp) / rope.factor)


def rotary_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [T, 1, D / 2]."""
    angles = positions.float().unsqueeze(1) * frequencies
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D]: rotate the pairs (i, i + D / 2), in float32."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
