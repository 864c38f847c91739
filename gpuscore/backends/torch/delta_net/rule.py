"""The parts of a linear layer: a causal convolution, the gated delta rule in chunks, a gated norm.

Per head and token, with a state S [Dk, Dv], key k, value v, decay a and strength b:

    S = a S;  S = S + k (b (v - k' S))';  output = q' S

A chunk of rows is computed at once (Yang et al., "Gated Delta Networks", 2024): what the rows write
solves a triangular system, because a row's correction depends on the rows before it. All is float32
inside. These functions define what those in C compute (`rows_in_c`); the plain recurrence is in
`tests/support/recurrence.py`.

Shapes: T rows, Hk key heads, R value heads of each, Dk and Dv their sizes, n chunks of L rows, C
convolved columns. Tensors of T + 1 rows end with a row of zeros, which pads chunks and changes no
state.
"""

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-6  # in the norm of queries and keys


def convolve(
    mixed: Tensor, extra: Tensor, places: Tensor, weight: Tensor, keys: int, size: int
) -> Tensor:
    """Convolve columns causally along each row's own prompt, then SiLU; norm queries and keys.

    Args:
        mixed: [T, C] queries, keys and values.
        extra: [x, C] kept rows, the last of them zeros.
        places: [T, kernel] of the rows that each row sees, in mixed and then extra.
        weight: [kernel, C], float32.
        keys: columns of queries, and of keys.
        size: of a key head.

    Returns:
        float32 [T + 1, C].
    """
    source = torch.cat((mixed, extra))
    out = weight.new_zeros(len(mixed) + 1, weight.shape[1])
    for of_tap, place in zip(weight, places.unbind(1), strict=True):
        out[:-1].addcmul_(source[place].float(), of_tap)
    functional.silu(out, inplace=True)
    heads = out[:, : 2 * keys].view(len(out), 2, -1, size)
    heads *= torch.rsqrt(heads.square().sum(-1, keepdim=True) + EPS)
    heads[:, 0] *= size**-0.5
    return out


def gated_norm(out: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm each head of out [T, heads, Dv], times SiLU of the gate [T, heads Dv], in its dtype."""
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * weight
    return (normed.flatten(1) * functional.silu(gate.float())).to(gate.dtype)


def delta_chunks(
    convolved: Tensor,
    strength: Tensor,
    decay: Tensor,
    rows: Tensor,
    sources: Tensor | None,
    ends: Tensor,
    before: Tensor,
    out: Tensor,
) -> Tensor:
    """Compute the chunks of one `ChunkGroup`.

    Args:
        convolved: [T + 1, C], as `convolve` returns it.
        strength: [T + 1, R Hk].
        decay: [T + 1, R Hk], logarithms.
        rows, sources, ends: of the group.
        before: [X, Hk, Dk, R Dv] the states that `sources` numbers.
        out: [T + 1, R Hk, Dv], to which outputs are written.

    Returns:
        The states [m, Hk, Dk, R Dv] after the chunks `ends`.
    """
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
    found = ((q @ k.transpose(-1, -2)).unsqueeze(2) * between) @ written
    out.view(grouped)[rows] = (found if read is None else found + read).permute(0, 3, 1, 2, 4)
    return _ends(k[ends], log[ends], written[ends], _chosen(state, ends))


def _decays(log: Tensor) -> Tensor:
    """Return the decay from each row to each later one, [n, Hk, R, L, L], 0 for earlier ones."""
    size = log.shape[-1]
    future = torch.ones(size, size, dtype=torch.bool, device=log.device).triu(1)
    return (log.unsqueeze(-1) - log.unsqueeze(-2)).masked_fill_(future, -torch.inf).exp_()


def _read(x: Tensor, state: Tensor, repeat: int) -> Tensor:
    """Return what x [n, Hk, L, Dk] reads from a state of each chunk, or one, [n, Hk, R, L, Dv]."""
    found = x @ state
    return found.view(*x.shape[:3], repeat, -1).transpose(2, 3)


def _chosen(state: Tensor | None, ends: Tensor) -> Tensor | None:
    return state if state is None or len(state) == 1 else state[ends]


def _ends(k: Tensor, log: Tensor, written: Tensor, state: Tensor | None) -> Tensor:
    """Return the states after chunks."""
    total = log[..., -1:]
    new = written * (total - log).exp().unsqueeze(-1)
    added = k.transpose(-1, -2) @ new.transpose(2, 3).flatten(-2)
    if state is None:
        return added
    kept = total.exp().squeeze(-1).repeat_interleave(written.shape[-1], dim=-1)
    return torch.addcmul(added, state, kept.unsqueeze(2))
