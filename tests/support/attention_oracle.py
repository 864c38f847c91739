"""Attention by the mask rule of a packed batch, in NumPy and float64, row by row."""

import numpy as np
from numpy.typing import NDArray

from gpuscore.types.batch import PackedBatch, prefix_slots, visible_rows

Array = NDArray[np.float64]


def attention(
    batch: PackedBatch,
    page_size: int,
    q: Array,
    k: Array,
    v: Array,
    pool_k: Array,
    pool_v: Array,
    window: int | None = None,
    softcap: float | None = None,
) -> Array:
    """Map q [T, H, D], k and v [T, Hkv, D] and pools [slots, Hkv, D] to the output [T, H, D].

    With a window, row i sees keys at positions over position(i) - window.
    """
    seen = visible_rows(batch)
    segment_of = np.repeat(np.arange(len(batch.parent)), np.diff(batch.cu_seqlens))
    group = q.shape[1] // k.shape[1]
    out = np.empty_like(q)
    for row in range(len(q)):
        request = batch.request_of[segment_of[row]]
        slots = prefix_slots(batch, request, page_size)
        positions = np.concatenate([np.arange(len(slots)), batch.positions[seen[row]]])
        near = positions > batch.positions[row] - (window or np.inf)
        keys, values = (  # [n, H, D]: a KV head for each query head
            np.concatenate([pool[slots], rows[seen[row]]])[near].repeat(group, axis=1)
            for pool, rows in ((pool_k, k), (pool_v, v))
        )
        scores = np.einsum("nhd,hd->nh", keys, q[row]) / np.sqrt(q.shape[2])
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max(axis=0))
        out[row] = np.einsum("nh,nhd->hd", weights / weights.sum(axis=0), values)
    return out
