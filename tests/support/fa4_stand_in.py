"""Stands in for FlashAttention 4's compiled kernel: the same arguments, in float64 on a CPU, by the
lists and numbers alone. What no list names is never read."""

import torch

from gpuscore_kernels.hopper_attention.kernel import KEYS, ROWS


def kernel(q, k, v, out, lse, scale, *rest):
    """Attend q [1, M, H, D] to k and v [1, T, Hkv, D]; write `out`."""
    masked_count, masked, full_count, full = (x[0, 0] for x in rest[8][:4])
    ((numbers,), _) = rest[9]
    assert lse is None
    assert rest[:8] == (None,) * 8
    assert rest[10:] == (None, None)
    group = q.shape[2] // k.shape[2]
    tokens, count = ROWS // group, q.shape[1]
    assert len(masked_count) == len(full_count) == -(-count // tokens)
    behind = torch.zeros(1, KEYS, *k.shape[2:], dtype=torch.float64)  # as the copy engine fills
    k, v = (torch.cat([x.double(), behind], 1)[0].repeat_interleave(group, 1) for x in (k, v))
    for tile in range(len(masked_count)):
        rows = torch.arange(tile * tokens, min((tile + 1) * tokens, count))
        keys, visible = [], []
        for is_full, lengths, places in ((False, masked_count, masked), (True, full_count, full)):
            chosen = places[tile, : lengths[tile]].tolist()
            assert chosen == sorted(set(chosen))
            for block in chosen:
                keys.append(block * KEYS + torch.arange(KEYS))
                seen = (rows[:, None] >= numbers[0, keys[-1]]) & (
                    rows[:, None] < numbers[1, keys[-1]]
                )
                visible.append(torch.ones_like(seen) if is_full else seen)
        if not keys:
            out[0, rows] = 0
            continue
        key, seen = torch.cat(keys), torch.cat(visible, 1)
        assert len(set(key.tolist())) == len(key)
        scores = torch.einsum("mhd,thd->hmt", q[0, rows].double(), k[key]) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        weights = weights.where(seen.any(1, keepdim=True), 0.0)  # of padding
        out[0, rows] = torch.einsum("hmt,thd->mhd", weights, v[key]).to(out.dtype)
