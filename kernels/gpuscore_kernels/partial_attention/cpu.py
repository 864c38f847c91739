"""`partial_attention` on torch's CPU flash operator, which returns the log-sum-exp.

The operator crashes the process if there are no rows or no keys, and gives lse 0 instead of -inf to
a row whose keys are all masked; both are handled here. It has no soft-cap, so attention with one is
computed here in tiles.
"""

import torch
from torch import Tensor

from gpuscore_kernels.partial_attention.visibility import Visibility

ROW_TILE = 256  # rows computed together if there is a mask; with a window they share a key range
CAPPED_TILE = 1 << 21  # float32 scores that a pass with a soft-cap holds at a time


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    visible: Visibility,
    softcap: float | None,
    skip_hidden: bool,
) -> tuple[Tensor, Tensor]:
    if 0 in q.shape or k.shape[2] == 0:
        return _nothing(q)
    if softcap is None and visible.first_key is None:
        return _flash(q, k, v, scale, visible)
    out, lse = _nothing(q)
    for rows in _row_tiles(q, k, softcap):
        keys = visible.span(rows, k.shape[2]) if skip_hidden else slice(0, k.shape[2])
        if keys.stop > keys.start:
            hidden = visible.hidden(rows, keys, q.device)
            tile = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            out[:, :, rows], lse[:, :, rows] = (
                _flash_masked(*tile, scale, hidden)
                if softcap is None
                else _capped(*tile, scale, hidden, softcap)
            )
    return out, lse


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of rows that see no key."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, dtype=dtype)


def _row_tiles(q: Tensor, k: Tensor, softcap: float | None) -> list[slice]:
    batch, heads, rows, _ = q.shape
    step = ROW_TILE
    if softcap is not None:
        most = max(1, min(step, CAPPED_TILE // (batch * heads * k.shape[2])))
        step = 1 << (most.bit_length() - 1)  # a power of two: few row counts leave a smaller tile
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Visibility
) -> tuple[Tensor, Tensor]:
    if visible.key_mask is not None:
        hidden = visible.hidden(slice(0, q.shape[2]), slice(0, k.shape[2]), q.device)
        return _flash_masked(q, k, v, scale, hidden)
    shape = q.shape
    if not visible.causal:
        q = _fold_heads(q, k)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, visible.causal, attn_mask=None, scale=scale
    )
    return out.reshape(shape), lse.reshape(shape[:3])


def _fold_heads(q: Tensor, k: Tensor) -> Tensor:
    """Make rows of the heads that share a KV head: fewer, larger matrix products."""
    batch, heads, rows, dim = q.shape
    return q.reshape(batch, k.shape[1], heads // k.shape[1] * rows, dim)


def _flash_masked(
    q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    bias = None
    if hidden is not None:
        bias = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
        bias = bias.expand(len(q), -1, -1, -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=scale
    )
    if hidden is None:
        return out, lse
    blind = hidden.all(dim=-1).expand(lse.shape)
    return out.masked_fill_(blind.unsqueeze(-1), 0), lse.masked_fill_(blind, -torch.inf)


def _capped(
    q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None, softcap: float
) -> tuple[Tensor, Tensor]:
    """Compute one tile in float32: the cap comes before the mask and the log-sum-exp."""
    compute = torch.promote_types(q.dtype, torch.float32)
    folded = _fold_heads(q, k).to(compute)
    scores = (folded @ k.to(compute).transpose(-1, -2)).mul_(scale / softcap)
    scores = scores.tanh_().mul_(softcap).view(*q.shape[:3], -1)  # [B, H, m, s]
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    base = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
    weights = scores.sub_(base.unsqueeze(-1)).exp_().view(*folded.shape[:3], -1)
    return (weights @ v.to(compute)).view(q.shape).to(q.dtype), lse
