"""Functions of rows in plain torch: what the kernels of norms, gates and rotation are checked with.

Rounding points are those of transformers: norms and rotation are float32 inside (float64 for
float64), and the activation of a gated MLP is rounded before the product.
"""

import torch
from torch import Tensor
from torch.nn import functional


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


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up; gate_up [T, 2I] holds the gate's columns, then the up projection's."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    return functional.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of x [T, H, D], in float32 (float64 for float64).

    cos and sin are [T, 1, D / 2].
    """
    left, right = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def norm_and_rotate(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, one_plus: bool
) -> Tensor:
    return rotate(x if weight is None else rms_norm(x, weight, eps, one_plus), cos, sin)


def store(pages: tuple[Tensor, Tensor], slots: Tensor, k: Tensor, v: Tensor) -> None:
    kept = torch.nonzero(slots >= 0)[:, 0]
    for side, values in zip(pages, (k, v), strict=True):
        side.index_copy_(1, slots[kept].long(), values[kept].transpose(0, 1))
