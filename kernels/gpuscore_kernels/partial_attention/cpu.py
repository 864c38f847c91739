"""`partial_attention` on torch's CPU flash operator, the one that returns the log-sum-exp.

Its traps, each handled here: no rows or no keys crash the process, and a row whose keys are all
masked gets lse 0 instead of -inf.
"""

import torch
from torch import Tensor


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, heads, rows, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    if batch == 0 or rows == 0 or keys == 0:
        dtype = torch.promote_types(q.dtype, torch.float32)
        return torch.zeros_like(q), torch.full((batch, heads, rows), -torch.inf, dtype=dtype)
    if not causal:
        # Heads that share a KV head become rows: fewer, larger matrix products.
        q = q.reshape(batch, kv_heads, heads // kv_heads * rows, dim)
    bias = None if key_mask is None else _as_bias(key_mask, q)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    out, lse = out.reshape(batch, heads, rows, dim), lse.reshape(batch, heads, rows)
    if key_mask is not None:
        blind = ~key_mask.any(dim=1)
        out[blind], lse[blind] = 0, -torch.inf
    return out, lse


def _as_bias(key_mask: Tensor, q: Tensor) -> Tensor:
    """0 where visible, -inf where not: [B, 1, 1, S], expanded over the rows without a copy."""
    bias = torch.zeros(key_mask.shape, dtype=q.dtype).masked_fill_(~key_mask, -torch.inf)
    return bias[:, None, None, :].expand(-1, 1, q.shape[2], -1)
