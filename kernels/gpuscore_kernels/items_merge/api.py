"""The second half of two-pass attention: rows attend to their own segments, then merge.

The first half is dense and has no mask: all rows of a request attend to the keys they share (cached
prefix and parent), by any fast kernel that returns its log-sum-exp. Here each row continues from
that result as if the shared keys had been the first ones in its own softmax (Hydragen,
arXiv 2402.05099, with the merge inside the second pass).
"""

from torch import Tensor

from gpuscore_kernels.extend_attention.api import Implementation, check
from gpuscore_kernels.extend_attention.config import TileConfig
from gpuscore_kernels.extend_attention.table import DeviceTiles
from gpuscore_kernels.items_merge import reference


def items_merge(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared_out: Tensor,
    shared_lse: Tensor,
    tiles: DeviceTiles,
    *,
    scale: float,
    softcap: float | None = None,
    need_lse: bool = False,
    config: TileConfig,
    impl: Implementation,
) -> tuple[Tensor, Tensor | None]:
    """Attend the query rows of `tiles` to their own segments, and merge.

    Args:
        q: [M, H, D], the table's M rows; H is a multiple of Hkv, D at most 256.
        k, v: [T, Hkv, D] of all rows of the batch.
        shared_out: [M, H, D], each row's result over the keys that it shares with others.
        shared_lse: float32 [M, H], its log-sum-exp, natural log; -inf = the row shares no keys, and
            its `shared_out` is not used.
        tiles: the batch's table, of the shape `config.shape(H // Hkv)`, made with `shared=False`.
        scale, softcap, need_lse, config, impl: as for `extend_attention`.

    Returns:
        out [M, H, D] in q's dtype, and lse [M, H] over all keys, float32 (None unless asked for).

    Raises:
        ValueError: shapes or dtypes do not fit, or the table has shared keys.
    """
    check(q, k, v, tiles, scale, config)
    if shared_out.shape != q.shape or shared_lse.shape != q.shape[:2]:
        raise ValueError(
            f"shapes do not fit: q {tuple(q.shape)}, shared_out {tuple(shared_out.shape)}, "
            f"shared_lse {tuple(shared_lse.shape)}"
        )
    if not tiles.own_only:
        raise ValueError("the table has shared keys, which would count twice")
    if impl == "reference":
        out, lse = reference.items_merge(
            q, k, v, shared_out, shared_lse, tiles, scale=scale, softcap=softcap
        )
        return out, lse if need_lse else None
    from gpuscore_kernels.extend_attention.launch import launch

    return launch(
        q,
        k,
        v,
        None,
        (shared_out, shared_lse),
        tiles,
        scale=scale,
        softcap=softcap,
        need_lse=need_lse,
        config=config,
    )
