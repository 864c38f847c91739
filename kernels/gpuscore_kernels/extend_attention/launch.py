"""The launch of `extend_attention_kernel`, for `extend_attention` and `items_merge`."""

from typing import Any

import torch
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.extend_attention.config import TileConfig
from gpuscore_kernels.extend_attention.table import DeviceTiles
from gpuscore_kernels.extend_attention.triton import LOG2_E, constants, extend_attention_kernel
from gpuscore_kernels.launch import pdl_option


@chosen_once
def _launch(group: int, dim: int, config: TileConfig, **choices: Any) -> CachedLaunch:
    return CachedLaunch(
        extend_attention_kernel,
        constants(group, dim, config, **choices),
        {"num_warps": config.num_warps, "num_stages": config.num_stages} | pdl_option(config.pdl),
        free=1,
        dtypes=(0, 3, 4, 7, 8),  # q, the pool and earlier results; tables are int32
    )


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: tuple[Tensor, Tensor] | None,
    before: tuple[Tensor, Tensor] | None,
    tiles: DeviceTiles,
    *,
    scale: float,
    softcap: float | None,
    need_lse: bool,
    config: TileConfig,
) -> tuple[Tensor, Tensor | None]:
    """Launch `extend_attention` (with `pool`) or `items_merge` (with `before`); see their `api`."""
    num_rows, heads, dim = q.shape
    out = q.new_empty(num_rows, heads, dim)
    lse = q.new_empty((num_rows, heads), dtype=torch.float32)
    num_tiles, kv_heads = tiles.tiles.shape[0], k.shape[1]
    if num_tiles == 0:
        return out, lse if need_lse else None
    pool_k, pool_v = pool or (k.transpose(0, 1), v.transpose(0, 1))  # unused
    before_out, before_lse = before or (out, lse)  # unused
    log2_e = LOG2_E.value
    of_rows = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    of_pool = (*pool_k.stride()[1::-1], *pool_v.stride()[1::-1])
    of_results = (*out.stride()[:2], *lse.stride())
    of_before = of_results if before is None else (*before_out.stride()[:2], *before_lse.stride())
    tables = (tiles.rows, tiles.tiles, tiles.pool_tiles, tiles.masked)
    factor = scale * log2_e if softcap is None else 2 * scale * log2_e / softcap
    chosen = _launch(
        heads // kv_heads,
        dim,
        config,
        window=tiles.window,
        pool=pool is not None,
        cap=softcap is not None,
        merge=before is not None,
        need_lse=need_lse,
    )
    chosen(
        (num_tiles, kv_heads),
        (q, k, v, pool_k, pool_v, out, lse, before_out, before_lse, *tables),
        (num_rows, factor, softcap or 0.0, *of_rows, *of_pool, *of_results, *of_before),
    )
    return out, lse if need_lse else None
