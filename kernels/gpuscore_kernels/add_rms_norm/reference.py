"""The RMS norm with transformers' rounding points, in plain torch."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    """Norm x [..., E] with weight [E], in float32 (float64 for float64), rounding as transformers.

    Llama-like models round, then multiply by the weight. Gemma (`one_plus`) multiplies by
    1 + weight in float32 and rounds afterwards.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if one_plus:
        return (normed * (1 + weight.to(compute))).to(x.dtype)
    return weight * normed.to(x.dtype)


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, one_plus: bool
) -> tuple[Tensor, Tensor]:
    """Return x + delta [T, E], and its norm."""
    if delta is not None:
        x = x + delta
    return x, rms_norm(x, weight, eps, one_plus)
