"""Attention of a packed batch over cached pages and over itself, in one launch.

The mask rule: a row sees its request's cached prefix, all of its segment's ancestors and its own
segment up to itself. A tile table (`tiles`), built once per batch, lists the keys that rows see.
"""

import torch
from torch import Tensor

from gpuscore_kernels.extend_attention.config import MAX_HEAD_DIM, TileConfig
from gpuscore_kernels.extend_attention.table import DeviceTiles


def extend_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    tiles: DeviceTiles,
    *,
    scale: float,
    softcap: float | None = None,
    config: TileConfig,
) -> Tensor:
    """Attend the query rows of `tiles`.

    Args:
        q: [M, H, D], the table's M rows; H is a multiple of Hkv, D at most 256.
        k, v: [T, Hkv, D] of all rows of the batch.
        pool_k, pool_v: [Hkv, slots, D], cached keys and values by slot. Slots that no row sees
            have no effect, even if they hold NaN.
        tiles: the batch's table, of the shape `config.shape(H // Hkv)`.
        scale: factor on q k^T, over 0.
        softcap: scores s = scale * q k^T become softcap * tanh(s / softcap), before the softmax.
        config: sizes of the kernel's tiles.

    They are float32, float16 or bfloat16 on CUDA; float32 or float16 in Triton's interpreter on a
    CPU, which computes bfloat16 wrongly. The last dimension of every tensor is contiguous; other
    strides are free.

    Returns:
        [M, H, D] in q's dtype. Sums are float32; weights are rounded to v's dtype before they are
        multiplied with v.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check(q, k, v, tiles, scale, config)
    for pool in (pool_k, pool_v):
        if pool.dim() != 3 or (pool.shape[0], pool.shape[2]) != k.shape[1:]:
            raise ValueError(f"shapes do not fit: pool {tuple(pool.shape)}, k {tuple(k.shape)}")
        _check_contiguous(pool)
    from gpuscore_kernels.extend_attention.triton import launch  # only where Triton is

    return launch((q, k, v), (pool_k, pool_v), tiles, scale, softcap, config)


def _check(
    q: Tensor, k: Tensor, v: Tensor, tiles: DeviceTiles, scale: float, config: TileConfig
) -> None:
    """Raise ValueError for arguments that the kernels cannot compute."""
    sizes, of_keys = q.shape, k.shape  # torch makes a new object at every reading
    if len(sizes) != 3 or of_keys != v.shape or sizes[2] != of_keys[2] or sizes[1] % of_keys[1]:
        raise ValueError(
            f"shapes do not fit: q {tuple(sizes)}, k {tuple(of_keys)}, v {tuple(v.shape)}"
        )
    if sizes[2] > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {sizes[2]}; supported: at most {MAX_HEAD_DIM}")
    if sizes[0] != tiles.rows.shape[1]:
        raise ValueError(f"the table has {tiles.rows.shape[1]} query rows, q has {sizes[0]}")
    if tiles.shape != config.shape(sizes[1] // of_keys[1]):
        raise ValueError(f"the table's {tiles.shape} does not belong to {config}")
    if not scale > 0:
        raise ValueError(f"scale is {scale}, but must be over 0")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"dtypes of q, k and v differ: {q.dtype}, {k.dtype}, {v.dtype}")
    for x in (q, k, v):
        _check_contiguous(x)


def _check_contiguous(x: Tensor) -> None:
    if x.stride(-1) != 1 and torch.numel(x) > 1:
        raise ValueError(f"the last dimension must be contiguous; strides are {x.stride()}")
