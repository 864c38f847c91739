"""Linear attention (gated delta rule) in plain torch, on any device, row by row.

A place names a row: n is row n of the batch, -1 is zeros, -2 - n is row n of all slots' tails.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore_kernels.delta_net import Walks, strengths

EPS = 1e-6  # in the norm of queries and keys


def convolve(
    mixed: Tensor, tails: Tensor, places: Tensor, weight: Tensor, keys: int, size: int
) -> Tensor:
    """Convolve each column over the tokens of a prompt, apply SiLU, and norm queries and keys.

    Args:
        mixed: [T, C] queries, keys and values, of any dtype.
        tails: [slots, kernel - 1, C] rows of earlier batches, of the same dtype.
        places: int32 [T, kernel - 1], for each row the places of the rows before it in its prompt.
        weight: [kernel, C].
        keys: number of query columns, and of key columns.
        size: the size of a key head.

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
    """Write rows into tails. An entry of `kept`, int32 [K + 1, kernel], is a slot and the places of
    its new rows; the last entry has slot -1. An entry may read its own slot, whose rows then move
    to the front only, and slots that later entries write."""
    tails[kept[:-1, 0]] = _rows_at(mixed, tails, kept[:-1, 1:])


def _rows_at(mixed: Tensor, tails: Tensor, places: Tensor) -> Tensor:
    """Return rows of the batch, or kept ones, or zeros, [..., C]."""
    new, old = (x.clamp(min=0) for x in (places, -2 - places))
    rows = mixed[new].where((places >= 0).unsqueeze(-1), tails.flatten(0, 1)[old])
    return rows.masked_fill_((places == -1).unsqueeze(-1), 0)


def gated_norm(out: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm each head of out [T, heads, Dv] with weight [Dv], and multiply by SiLU of the gate
    [T, heads Dv]. The result has the gate's dtype."""
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * weight
    return (normed.flatten(1) * functional.silu(gate.to(weight))).to(gate.dtype)


def delta_rule(
    convolved: Tensor, gates: Tensor, decay: Tensor, bias: Tensor, walks: Walks, pool: Tensor
) -> Tensor:
    """Apply the gated delta rule to all rows, and write the kept states to the pool.

    Args:
        convolved: [T, C], as `convolve` returns it.
        gates: [T, 2 R Hk] of any dtype: the strengths (before the sigmoid), then the steps.
        decay: [R Hk], the logarithm of the decay in a step of 1.
        bias: [R Hk], added to the steps before the softplus.
        walks: over all rows, in chunks of up to `CHUNK_SIZE`.
        pool: [slots, Hk, Dk, R Dv]. No walk reads a slot that another walk of its level writes.

    Returns:
        The outputs [T, R Hk, Dv].
    """
    heads, key_size = pool.shape[1:3]
    rows = len(convolved)
    keys = heads * key_size
    repeat = len(decay) // heads
    q, k, v = convolved.tensor_split((keys, 2 * keys), dim=1)
    q, k = (x.view(rows, heads, 1, 1, key_size) for x in (q, k))
    by_value_head = v, *strengths(gates, decay, bias)
    v, b, log = (x.reshape(rows, heads, repeat, 1, -1) for x in by_value_head)
    a = log.exp()
    out = torch.empty_like(v)
    states = pool.view(*pool.shape[:3], repeat, -1).transpose(2, 3)  # [slots, Hk, R, Dk, Dv]
    held = states.new_zeros(walks.held + 1, *states.shape[1:])
    by_place = *states, *held  # `held` is indexed from the end: -1 = zeros, -2, ...
    chunks = walks.chunks.tolist()
    begins = walks.begins.tolist()
    for first, stop_chunk, source in torch.cat(walks.walks).tolist():
        state = by_place[source]
        for (start, *targets), (stop, *_) in pairwise(chunks[first : stop_chunk + 1]):
            begun = state
            for row in range(start, stop):
                state = a[row] * (begun if begins[row] == row else state)
                state = state.addcmul(k[row].mT, b[row] * (v[row] - k[row] @ state))
                out[row] = q[row] @ state
            for target in targets:
                if target != -1:
                    by_place[target].copy_(state)
    return out.view(rows, heads * repeat, -1)
