"""Stands in for FlashAttention 4's compiled kernel: the same arguments, in float64 on a CPU, by the
lists and numbers alone. What no list names is never read."""

import torch

from gpuscore_kernels.hopper import KEYS, ROWS


def kernel(q, k, v, out, lse, scale, *rest):
    """Attend q [1, M, H, D] to k and v [1, T, Hkv, D]; write `out`."""
    *lists, numbers = *(x[0, 0] for x in rest[8][:4]), rest[9][0][0]
    group, count = q.shape[2] // k.shape[2], q.shape[1]
    behind = torch.zeros(1, KEYS, *k.shape[2:], dtype=torch.float64)  # as the copy engine fills
    k, v = (torch.cat([x.double(), behind], 1)[0].repeat_interleave(group, 1) for x in (k, v))
    for tile, rows in enumerate(torch.arange(count).split(ROWS // group)):
        (masked, full) = (places[tile, : n[tile]] for n, places in (lists[:2], lists[2:]))
        for blocks in (masked, full):
            assert blocks.tolist() == sorted(set(blocks.tolist()))
        blocks = torch.cat([masked, full])
        assert len(blocks) == len(blocks.unique())
        key = (blocks[:, None] * KEYS + torch.arange(KEYS)).flatten()
        seen = (rows[:, None] >= numbers[0, key]) & (rows[:, None] < numbers[1, key])
        seen[:, len(masked) * KEYS :] = True
        scores = torch.einsum("mhd,thd->hmt", q[0, rows].double(), k[key]) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        weights = weights.where(seen.any(1, keepdim=True), 0.0)  # of padding
        out[0, rows] = torch.einsum("hmt,thd->mhd", weights, v[key]).to(out.dtype)
