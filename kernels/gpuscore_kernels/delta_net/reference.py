"""Linear layers in plain torch, on any device.

All rows of a chunk are computed at once: what they write solves a triangular system, because a
row's correction depends on the rows before it.

A place of a row is its number in the batch, or -1 = zeros, or -2 - n for row n of all tails.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore_kernels.delta_net import Walks, strengths

EPS = 1e-6  # in the norm of queries and keys


def convolve(
    mixed: Tensor, tails: Tensor, places: Tensor, weight: Tensor, keys: int, size: int
) -> Tensor:
    """Convolve each column along the prompt of each row, apply SiLU, and norm queries and keys.

    Args:
        mixed: [T, C] queries, keys and values, of any dtype.
        tails: [slots, kernel - 1, C] kept rows of the same dtype.
        places: int32 [T, kernel - 1] of the rows that each row sees before itself.
        weight: [kernel, C].
        keys: columns of queries, and of keys.
        size: of a key head.

    Returns:
        float32 [T, C].
    """
    out = mixed.to(weight) * weight[-1]
    for tap, place in zip(weight, places.unbind(1), strict=False):
        out.addcmul_(_rows_at(mixed, tails, place).to(weight), tap)
    functional.silu(out, inplace=True)
    heads = out[:, : 2 * keys].view(len(out), 2, -1, size)
    heads *= torch.rsqrt(heads.square().sum(-1, keepdim=True) + EPS)
    heads[:, 0] *= size**-0.5
    return out


def keep_tails(mixed: Tensor, tails: Tensor, kept: Tensor) -> None:
    """Write rows into tails: a slot, and the places of its rows, are an entry of int32 kept
    [K, kernel]. Its own rows may only move forward."""
    slots, places = kept[:, 0].long(), kept[:, 1:]
    tails.index_copy_(0, slots, _rows_at(mixed, tails, places))


def _rows_at(mixed: Tensor, tails: Tensor, places: Tensor) -> Tensor:
    """Return rows of the batch, or kept ones, or zeros, [..., C]."""
    own, old = (x.clamp(min=0) for x in (places, -2 - places))
    rows = mixed[own].where((places >= 0).unsqueeze(-1), tails.flatten(0, 1)[old])
    return rows.masked_fill_((places == -1).unsqueeze(-1), 0)


def gated_norm(out: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm each head of out [T, heads, Dv] with weight [Dv], times SiLU of the gate [T, heads Dv],
    whose dtype the result has."""
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * weight
    return (normed.flatten(1) * functional.silu(gate.to(weight))).to(gate.dtype)


def delta_rule(
    convolved: Tensor, gates: Tensor, decay: Tensor, bias: Tensor, walks: Walks, pool: Tensor
) -> Tensor:
    """Compute all rows, and keep states.

    Args:
        convolved: [T, C], as `convolve` returns it.
        gates: [T, 2 R Hk] of any dtype, each row in order: strengths before the sigmoid, and steps.
        decay: [R Hk], logarithms for a step of 1.
        bias: [R Hk] of the step, before the softplus.
        walks: over all rows, in chunks of up to `LONGEST`.
        pool: [slots, Hk, Dk, R Dv]. No walk reads a slot that another one of its level writes.

    Returns:
        The outputs [T, R Hk, Dv].
    """
    heads, key_size = pool.shape[1:3]
    rows, keys, repeat = len(convolved), heads * key_size, len(decay) // heads
    q, k = (
        x.view(rows, heads, 1, key_size).permute(1, 2, 0, 3)  # [Hk, 1, T, Dk]
        for x in convolved[:, : 2 * keys].tensor_split(2, dim=1)
    )
    v = convolved[:, 2 * keys :].view(rows, heads, repeat, -1).permute(1, 2, 0, 3)
    b, log = (x.view(rows, heads, repeat).permute(1, 2, 0) for x in strengths(gates, decay, bias))
    out = v.new_empty(rows, *v.shape[:2], v.shape[3])
    outputs = out.permute(1, 2, 0, 3)  # [Hk, R, T, Dv], as v
    states = pool.view(*pool.shape[:3], repeat, -1).transpose(2, 3)
    chunks = walks.chunks.tolist()
    held = {-1: torch.zeros_like(states[0])}
    for begin, end, source in walks.walks.tolist():
        state = states[source] if source >= 0 else held[source]
        for chunk in range(begin, end):
            (start, *targets), stop = chunks[chunk], chunks[chunk + 1][0]
            parts = sorted(set(walks.begins[start:stop].tolist()))
            for own in map(slice, parts, [*parts[1:], stop]):
                of_values = v[:, :, own], b[:, :, own], log[:, :, own]
                of_chunk = _chunk(q[:, :, own], k[:, :, own], *of_values, state)
                outputs[:, :, own], after = of_chunk
            for target in targets:
                if target >= 0:
                    states[target] = after
                elif target < -1:
                    held[target] = after
            state = after
    return out.flatten(1, 2)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, log: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs [Hk, R, L, Dv] of a chunk, and the state [Hk, R, Dk, Dv] after it."""
    log, by_row = log.cumsum(-1).unsqueeze(-1), b.unsqueeze(-1)
    # The decay from each row to each later one.
    between = (log - log.transpose(-1, -2)).exp().tril()
    known, read = (log.exp() * (x @ state) for x in (k, q))
    system = (k @ k.transpose(-1, -2)) * between * by_row
    right = (v - known) * by_row
    written = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    result = ((q @ k.transpose(-1, -2)) * between) @ written
    total = log[..., -1:, :]
    after = k.transpose(-1, -2) @ (written * (total - log).exp())
    return result + read, torch.addcmul(after, state, total.exp())
