"""Norm and activation with quantised results in plain torch: the one, then the other."""

import torch
from torch import Tensor

from gpuscore_kernels.quantized.reference import quantize_rows
from gpuscore_kernels.reference import add_rms_norm, gated


def quantized_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, one_plus: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    total, normed = add_rms_norm(x, delta, weight, eps, one_plus)
    return total, *quantize_rows(normed, dtype)


def quantized_gated(gate_up: Tensor, activation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return quantize_rows(gated(gate_up, activation), dtype)
