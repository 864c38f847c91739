"""The definition of `partial_attention` in plain torch: float32 scores, softmax and sums."""

import torch
from torch import Tensor

from gpuscore_kernels.partial_attention.visibility import Visibility

MAX_TILE = 1 << 24  # elements of one [B, H, m, S] tile of scores


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Visibility, softcap: float | None
) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = q.shape
    keys = k.shape[2]
    compute = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q)
    lse = torch.full((batch, heads, rows), -torch.inf, dtype=compute, device=q.device)
    if rows == 0 or keys == 0 or batch == 0:
        return out, lse
    group = heads // k.shape[1]
    k_all = k.to(compute).repeat_interleave(group, dim=1)
    v_all = v.to(compute).repeat_interleave(group, dim=1)
    step = max(1, MAX_TILE // (batch * heads * keys))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        scores = q[:, :, part].to(compute) @ k_all.transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = visible.hidden(part, slice(0, keys), q.device)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        tile_lse = torch.logsumexp(scores, dim=-1)
        base = torch.where(tile_lse == -torch.inf, torch.zeros_like(tile_lse), tile_lse)
        out[:, :, part] = (torch.exp(scores - base.unsqueeze(-1)) @ v_all).to(q.dtype)
        lse[:, :, part] = tile_lse
    return out, lse
