"""`partial_attention` on torch's CUDA operators that return the log-sum-exp.

`torch.nn.functional` does not return it, so the aten operators are called directly; their arguments
are the same from torch 2.11 to 2.13. cuDNN's log-sum-exp may have a last dimension of one or not.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend with FlashAttention-2, on any GPU since Ampere; head sizes up to 256."""
    return _folded(
        lambda *x: torch.ops.aten._scaled_dot_product_flash_attention(*x, scale=scale), q, k, v
    )


def cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend with cuDNN, the fastest of torch's operators on Hopper; head sizes up to 128."""
    return _folded(
        lambda *x: torch.ops.aten._scaled_dot_product_cudnn_attention(*x, None, True, scale=scale),
        q,
        k,
        v,
    )


def _folded(operator: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Call `operator` with the heads that share a KV head as rows.

    Without a mask the result is the same, and the operator need not support shared KV heads.
    """
    batch, heads, rows, dim = q.shape
    if 0 in q.shape or k.shape[2] == 0:
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
        return torch.zeros_like(q), lse
    folded = q.reshape(batch, k.shape[1], heads // k.shape[1] * rows, dim)
    out, lse, *_ = operator(folded, k, v)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])
