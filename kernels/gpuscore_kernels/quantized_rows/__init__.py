"""Norm and activation before a product of eight bits, with rows quantised in the same pass.

The result in the model's dtype is rounded to it, as if it were stored, but only its eight bits are.
"""

import torch
from torch import Tensor


def quantized_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    one_plus: bool = False,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + delta, and its norm in eight bits: `add_rms_norm`, then `quantize_rows`.

    Args:
        x, delta, weight, eps, one_plus: as for `add_rms_norm`.
        dtype: int8 or float8_e4m3fn.

    Returns:
        The sum [T, E] as `add_rms_norm` has it, q [T, E] and its scales [T].
    """
    from gpuscore_kernels.quantized_rows import triton  # only where Triton is

    return triton.quantized_norm(x, delta, weight, eps, one_plus, dtype)


def quantized_gated(
    gate_up: Tensor,
    activation: str,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return act(gate) * up in eight bits: `gated`, then `quantize_rows`.

    Args:
        gate_up, activation: as for `gated`.
        dtype: int8 or float8_e4m3fn.

    Returns:
        q [T, I] and its scales [T].
    """
    from gpuscore_kernels.quantized_rows import triton

    return triton.quantized_gated(gate_up, activation, dtype)
