"""The gated delta rule in plain torch; `gpuscore_kernels.delta_net` documents the functions.

All rows of a chunk are computed at once: what they write solves a triangular system, because a
row's correction depends on the rows before it.
"""

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-6  # in the norm of queries and keys


def convolve(
    mixed: Tensor, extra: Tensor, places: Tensor, weight: Tensor, keys: int, size: int
) -> Tensor:
    source = torch.cat((mixed, extra))
    out = weight.new_zeros(len(mixed) + 1, weight.shape[1])
    for of_tap, place in zip(weight, places.unbind(1), strict=True):
        out[:-1].addcmul_(source[place].to(weight), of_tap)
    functional.silu(out, inplace=True)
    heads = out[:, : 2 * keys].view(len(out), 2, -1, size)
    heads *= torch.rsqrt(heads.square().sum(-1, keepdim=True) + EPS)
    heads[:, 0] *= size**-0.5
    return out


def gated_norm(out: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * weight
    return (normed.flatten(1) * functional.silu(gate.to(weight))).to(gate.dtype)


def delta_chunks(
    convolved: Tensor,
    strength: Tensor,
    decay: Tensor,
    rows: Tensor,
    sources: Tensor | None,
    ends: int,
    before: Tensor,
    out: Tensor,
) -> Tensor:
    heads, key_size = before.shape[1:3]
    keys = heads * key_size
    q, k = (
        x.view(len(x), heads, key_size)[rows].transpose(1, 2)  # [n, Hk, L, Dk]
        for x in convolved[:, : 2 * keys].tensor_split(2, dim=1)
    )
    grouped = len(out), heads, -1, out.shape[2]
    v = convolved[:, 2 * keys :].view(grouped)[rows].permute(0, 2, 3, 1, 4)  # [n, Hk, R, L, Dv]
    b, log = (x.view(grouped[:3])[rows].permute(0, 2, 3, 1) for x in (strength, decay))
    log, by_row = log.cumsum(-1), b.unsqueeze(-1)
    state = None if sources is None else before[sources]
    between = _decays(log)
    new, read = v, None
    if state is not None:
        of_keys, read = (_read(x, state, v.shape[2]) * log.exp().unsqueeze(-1) for x in (k, q))
        new = v - of_keys
    system = (k @ k.transpose(-1, -2)).unsqueeze(2) * between * by_row
    written = torch.linalg.solve_triangular(system, new * by_row, upper=False, unitriangular=True)
    result = ((q @ k.transpose(-1, -2)).unsqueeze(2) * between) @ written
    out.view(grouped)[rows] = (result if read is None else result + read).permute(0, 3, 1, 2, 4)
    if state is not None and len(state) > 1:
        state = state[:ends]
    return _ends(k[:ends], log[:ends], written[:ends], state)


def _decays(log: Tensor) -> Tensor:
    """Return the decay from each row to each later one, [n, Hk, R, L, L], 0 for earlier ones."""
    size = log.shape[-1]
    future = torch.ones(size, size, dtype=torch.bool, device=log.device).triu(1)
    return (log.unsqueeze(-1) - log.unsqueeze(-2)).masked_fill_(future, -torch.inf).exp_()


def _read(x: Tensor, state: Tensor, repeat: int) -> Tensor:
    """Return what x [n, Hk, L, Dk] reads from a state of each chunk, or one, [n, Hk, R, L, Dv]."""
    product = x @ state
    return product.view(*x.shape[:3], repeat, -1).transpose(2, 3)


def _ends(k: Tensor, log: Tensor, written: Tensor, state: Tensor | None) -> Tensor:
    """Return the states after chunks."""
    total = log[..., -1:]
    new = written * (total - log).exp().unsqueeze(-1)
    added = k.transpose(-1, -2) @ new.transpose(2, 3).flatten(-2)
    if state is None:
        return added
    kept = total.exp().squeeze(-1).repeat_interleave(written.shape[-1], dim=-1)
    return torch.addcmul(added, state, kept.unsqueeze(2))
