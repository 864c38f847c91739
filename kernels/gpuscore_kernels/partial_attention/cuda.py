"""`partial_attention` on the operator of torch for CUDA that returns the log-sum-exp.

`torch.nn.functional` does not return it, so the aten operator is called directly; its arguments are
the same from torch 2.11 to 2.13.
"""

import torch
from torch import Tensor


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend with FlashAttention-2, on any GPU since Ampere; head sizes up to 256.

    Heads that share a KV head become rows. Without a mask the result is the same, and the operator
    need not support shared KV heads.
    """
    batch, heads, rows, dim = q.shape
    if 0 in q.shape or k.shape[2] == 0:
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
        return torch.zeros_like(q), lse
    folded = q.reshape(batch, k.shape[1], heads // k.shape[1] * rows, dim)
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = operator(folded, k, v, scale=scale)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])
