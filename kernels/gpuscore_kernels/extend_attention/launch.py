"""The launch of `extend_attention_kernel`."""

from typing import Any

from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.extend_attention.config import TileConfig
from gpuscore_kernels.extend_attention.table import DeviceTiles
from gpuscore_kernels.extend_attention.triton import LOG2_E, constants, extend_attention_kernel


@chosen_once
def _launch(group: int, dim: int, config: TileConfig, **choices: Any) -> CachedLaunch:
    return CachedLaunch(
        extend_attention_kernel,
        constants(group, dim, config, **choices),
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
        free=1,
        dtypes=(0, 3, 4),  # q and the pool; tables are int32
    )


def launch(
    rows: tuple[Tensor, Tensor, Tensor],
    pool: tuple[Tensor, Tensor],
    tiles: DeviceTiles,
    scale: float,
    softcap: float | None,
    config: TileConfig,
) -> Tensor:
    """Launch `api.extend_attention`."""
    (q, k, v), (pool_k, pool_v) = rows, pool
    num_rows, heads, dim = q.shape
    out = q.new_empty(num_rows, heads, dim)
    num_tiles, kv_heads = tiles.tiles.shape[0], k.shape[1]
    if num_tiles == 0:
        return out
    log2_e = LOG2_E.value
    of_rows = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    of_pool = (*pool_k.stride()[1::-1], *pool_v.stride()[1::-1])
    tables = (tiles.rows, tiles.tiles, tiles.pool_tiles, tiles.masked)
    factor = scale * log2_e if softcap is None else 2 * scale * log2_e / softcap
    cap = softcap is not None
    chosen = _launch(heads // kv_heads, dim, config, window=tiles.window, cap=cap)
    chosen(
        (num_tiles, kv_heads),
        (q, k, v, pool_k, pool_v, out, *tables),
        (num_rows, factor, softcap or 0.0, *of_rows, *of_pool, *out.stride()[:2]),
    )
    return out
