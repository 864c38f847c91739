"""QK norm, rotary embedding and the store of keys and values in plain torch, step by step."""

import torch
from torch import Tensor

from gpuscore_kernels.add_rms_norm.reference import rms_norm


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
