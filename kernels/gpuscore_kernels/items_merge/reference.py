"""The definition of `items_merge` in plain torch: two results, merged explicitly."""

import torch
from torch import Tensor

from gpuscore_kernels.extend_attention import reference
from gpuscore_kernels.extend_attention.table import DeviceTiles


def items_merge(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared_out: Tensor,
    shared_lse: Tensor,
    tiles: DeviceTiles,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    own_out, own_lse = reference.extend_attention(
        q, k, v, None, tiles, scale=scale, softcap=softcap
    )
    lse = torch.logaddexp(shared_lse.to(own_lse.dtype), own_lse)
    shared_weight = torch.exp(shared_lse - lse).unsqueeze(-1)
    shared = torch.where(shared_weight > 0, shared_weight * shared_out, 0)
    own = torch.exp(own_lse - lse).unsqueeze(-1) * own_out
    return (shared + own).to(q.dtype), lse
