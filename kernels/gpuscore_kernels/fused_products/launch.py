"""Launches of the fused products' kernels."""

from typing import Any, cast

import torch
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.fused_products.config import FusedConfig, config_for, config_of_heads
from gpuscore_kernels.fused_products.triton import (
    gated_constants,
    gated_product_kernel,
    heads_constants,
    heads_product_kernel,
)
from gpuscore_kernels.launch import arch_of, pdl_option
from gpuscore_kernels.qk_norm_rope_store.pages import Pages


@chosen_once
def _launch_gated(config: FusedConfig, pdl: bool, **choices: Any) -> CachedLaunch:
    return CachedLaunch(
        gated_product_kernel,
        gated_constants(config, **choices) | {"PDL": pdl},
        config.options() | pdl_option(pdl),
        free=1,
        dtypes=(0,),
    )


@chosen_once
def _launch_heads(config: FusedConfig, pdl: bool, **choices: Any) -> CachedLaunch:
    return CachedLaunch(
        heads_product_kernel,
        heads_constants(config, **choices) | {"PDL": pdl},
        config.options() | pdl_option(pdl),
        free=1,
        dtypes=(0, 3, 4, 5, 6, 10, 11, 12),  # q, k and v are made here
    )


def gated_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, pdl: bool
) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, width), inner = x.shape, len(weight) // 2
    out = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    config = config_for(arch_of(x), x.dtype)
    gelu = activation == "gelu_tanh"
    launch = _launch_gated(config, pdl, inner=inner, width=width, bias=bias is not None, gelu=gelu)
    launch(
        (-(-rows // config.BLOCK_M), -(-inner // cast(int, launch.constants["BLOCK_N"]))),
        (x, weight, weight if bias is None else bias, out),
        (rows, x.stride(0), width),
    )
    return out


def heads_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    sizes: tuple[int, int, int],
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
    one_plus: bool,
    pages: Pages | None,
    pdl: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; `sizes` are H, Hkv and D."""
    num_heads, num_kv_heads, head_dim = sizes
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, width = x.shape
    q, k, v = (
        torch.empty((rows, heads, head_dim), dtype=x.dtype, device=x.device)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    heads = num_heads + 2 * num_kv_heads
    if rows == 0 or heads == 0:
        return q, k, v
    config = config_of_heads(arch_of(x), x.dtype, head_dim // 2)
    stores = (k, v, cos) if pages is None else (pages.k, pages.v, pages.slots.contiguous())
    strides = (0, 0) if pages is None else (pages.k.stride(0), pages.k.stride(1))
    scales = [x if norm is None else norm for norm in norms]
    launch = _launch_heads(
        config, pdl, sizes=sizes, width=width, bias=bias is not None, norm=norms[0] is not None,
        one_plus=one_plus, pages=pages is not None,
    )  # fmt: skip
    launch(
        (-(-rows // config.BLOCK_M), heads),
        (x, weight, weight if bias is None else bias, cos.contiguous(), sin.contiguous(),
         *scales, q, k, v, *stores),
        (rows, x.stride(0), width, *strides, eps),
    )  # fmt: skip
    return q, k, v
