"""Fused products in Triton: a block of rows times two blocks of the weight's rows.

The two are gate and up of the same columns, or the two halves of a head, so whatever an element is
combined with is in the same thread block.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from gpuscore_kernels.dependent_launch import let_next_kernel_begin, wait_for_kernel_before
from gpuscore_kernels.fused_products.config import (
    GATED_COLUMNS,
    FusedConfig,
    config_for,
    config_of_heads,
)
from gpuscore_kernels.gated.triton import activated
from gpuscore_kernels.launch import next_power_of_two
from gpuscore_kernels.qk_norm_rope_store.triton import normed, put, turned
from gpuscore_kernels.variant import ARCHES, LoopRule, Variant, as_launched


@triton.jit
def _two_products(
    x,
    first,
    second,
    bias_first,
    bias_second,
    is_row,
    is_column,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Return two products [ROWS, COLUMNS] of pointers [.., BLOCK_K], as rounded by a library.

    `width` is not a compile-time constant, because the loop over it would be unrolled.
    """
    one = tl.zeros([ROWS, COLUMNS], tl.float32)
    other = tl.zeros([ROWS, COLUMNS], tl.float32)
    k = tl.arange(0, BLOCK_K)
    for start in range(0, width, BLOCK_K):
        a_mask, b_mask = is_row[:, None], is_column[:, None]
        if not EVEN_K:
            inside = (start + k < width)[None, :]
            a_mask, b_mask = a_mask & inside, b_mask & inside
        a = tl.load(x + start, mask=a_mask, other=0.0)
        b = tl.load(first + start, mask=b_mask, other=0.0)
        c = tl.load(second + start, mask=b_mask, other=0.0)
        one = tl.dot(a, tl.trans(b), one, input_precision="ieee")
        other = tl.dot(a, tl.trans(c), other, input_precision="ieee")
    if HAS_BIAS:
        one += tl.load(bias_first, mask=is_column, other=0.0).to(tl.float32)[None, :]
        other += tl.load(bias_second, mask=is_column, other=0.0).to(tl.float32)[None, :]
    dtype = x.dtype.element_ty
    return one.to(dtype), other.to(dtype)


# If specialised, Triton would compile different code for 1 row, multiples of 16 and other numbers.
@triton.jit(do_not_specialize=["num_rows"])
def gated_product_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    x_stride,
    width,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_kernel_before(PDL)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_rows, column < INNER
    k = tl.arange(0, BLOCK_K)
    wide = row.to(tl.int64)[:, None]
    first = weight + column.to(tl.int64)[:, None] * width + k[None, :]
    gate, up = _two_products(
        x + wide * x_stride + k[None, :], first, first + INNER * tl.cast(width, tl.int64),
        bias + column, bias + INNER + column, is_row, is_column, width,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, HAS_BIAS,
    )  # fmt: skip
    result = activated(gate, up, GELU)
    let_next_kernel_begin(PDL)
    place = out + wide * INNER + column[None, :]
    tl.store(place, result, mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def heads_product_kernel(
    x,
    weight,
    bias,
    cos,
    sin,
    q_norm,
    k_norm,
    q,
    k,
    v,
    k_pages,
    v_pages,
    slots,
    num_rows,
    x_stride,
    width,
    head_stride,
    slot_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    HAS_PAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_kernel_before(PDL)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    half = tl.arange(0, BLOCK_HALF)
    is_row, inside = row < num_rows, half < HALF
    mask = is_row[:, None] & inside[None, :]
    wide = row.to(tl.int64)[:, None]
    element = tl.arange(0, BLOCK_K)[None, :]
    column = head * (2 * HALF) + half
    first = weight + column.to(tl.int64)[:, None] * width + element
    raw_left, raw_right = _two_products(
        x + wide * x_stride + element, first, first + HALF * tl.cast(width, tl.int64),
        bias + column, bias + HALF + column, is_row, inside, width,
        BLOCK_M, BLOCK_HALF, BLOCK_K, EVEN_K, HAS_BIAS,
    )  # fmt: skip
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS

    raw_left, raw_right = raw_left.to(tl.float32), raw_right.to(tl.float32)
    left, right = raw_left, raw_right
    if HAS_NORM:
        scale = tl.where(is_q, q_norm, k_norm)
        left, right = normed(left, right, scale, 2 * HALF, eps, half, inside, ONE_PLUS)
    c = tl.load(cos + wide * HALF + half[None, :], mask=mask, other=0.0)
    s = tl.load(sin + wide * HALF + half[None, :], mask=mask, other=0.0)
    left, right = turned(raw_left, raw_right, left, right, c, s, is_v)

    kv_head = tl.where(is_v, head - HEADS - KV_HEADS, head - HEADS)
    to_kv = tl.where(is_v, v, k) + (wide * KV_HEADS + kv_head) * (2 * HALF)
    to = tl.where(is_q, q + (wide * HEADS + head) * (2 * HALF), to_kv)
    if HAS_PAGES:
        slot = tl.load(slots + row, mask=is_row, other=-1).to(tl.int64)[:, None]
        kept = mask & (slot >= 0) & (head >= HEADS)
        page = tl.where(is_v, v_pages, k_pages) + kv_head.to(tl.int64) * head_stride
    let_next_kernel_begin(PDL)
    put(to, half, left, right, mask, HALF)
    if HAS_PAGES:
        put(page + slot * slot_stride, half, left, right, kept, HALF)


def gated_constants(
    config: FusedConfig, inner: int, width: int, bias: bool, gelu: bool
) -> dict[str, object]:
    """Compile-time arguments of `gated_product_kernel`, without that of its launch."""
    return config.sizes() | {
        "INNER": inner,
        "BLOCK_N": min(GATED_COLUMNS, max(16, next_power_of_two(inner))),
        "EVEN_K": width % config.BLOCK_K == 0,
        "HAS_BIAS": bias,
        "GELU": gelu,
    }


def heads_constants(
    config: FusedConfig,
    sizes: tuple[int, int, int],
    width: int,
    bias: bool,
    norm: bool,
    one_plus: bool,
    pages: bool,
) -> dict[str, object]:
    """Compile-time arguments of `heads_product_kernel`, without that of its launch."""
    num_heads, num_kv_heads, head_dim = sizes
    return config.sizes() | {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HALF": head_dim // 2,
        "BLOCK_HALF": max(16, next_power_of_two(head_dim // 2)),
        "EVEN_K": width % config.BLOCK_K == 0,
        "HAS_BIAS": bias,
        "HAS_NORM": norm,
        "ONE_PLUS": one_plus,
        "HAS_PAGES": pages,
    }


def variants() -> Iterator[Variant]:
    for width, inner, gelu, quick in (
        (1024, 3072, False, (80, 90)),  # Qwen3-0.6B
        (2304, 9216, True, ()),  # Gemma 2 2B
    ):
        name = f"gated {width}x{inner} gelu={gelu}"
        constants = partial(gated_constants, inner=inner, width=width, bias=False, gelu=gelu)
        configs = {arch: config_for(arch, torch.bfloat16) for arch in ARCHES}
        yield from _variants(name, gated_product_kernel, constants, configs, quick)
    for width, sizes, norm, one_plus, quick in (
        (1024, (16, 8, 128), True, False, (90, 120)),  # Qwen3-0.6B
        (1024, (0, 8, 128), True, False, ()),  # its last layer
        (2560, (8, 4, 256), True, True, ()),  # Gemma 3 4B
    ):
        heads, kv_heads, dim = sizes
        name = f"heads={heads}/{kv_heads}x{dim} of {width} one_plus={one_plus}"
        configs = {arch: config_of_heads(arch, torch.bfloat16, dim // 2) for arch in ARCHES}
        some = partial(
            heads_constants,
            sizes=sizes,
            width=width,
            bias=False,
            norm=norm,
            one_plus=one_plus,
            pages=True,
        )
        yield from _variants(name, heads_product_kernel, some, configs, quick)


def _variants(
    name: str,
    kernel: Any,
    constants: Callable[[FusedConfig], Mapping[str, object]],
    configs: Mapping[int, FusedConfig],
    quick: tuple[int, ...],
) -> Iterator[Variant]:
    """Yield a variant in bfloat16 for each configuration."""
    types = {"num_rows": "i32", "eps": "fp32", "slots": "*i32", "cos": "*fp32", "sin": "*fp32"}
    types |= dict.fromkeys(("x_stride", "width", "head_stride", "slot_stride"), "i32")
    names = [name for name in kernel.arg_names if name.islower()]
    for config in dict.fromkeys(configs.values()):
        arches = tuple(arch for arch in ARCHES if configs[arch] == config)
        # In an iteration the tile of rows and two of the weight are copied, a group each.
        ahead = LoopRule(3 * (config.num_stages - 2))
        variant = Variant(
            name=f"{name} stages={config.num_stages}",
            kernel=kernel,
            signature={name: types.get(name, "*bf16") for name in names},
            constexprs=constants(config),
            divisible=tuple(name for name in names if name not in ("num_rows", "eps")),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            arches=arches,
            needs_wgmma=True,
            loops={"for start in range(0, width, BLOCK_K)": ahead},
            quick=tuple(arch for arch in quick if arch in arches),
        )
        yield from as_launched([variant])
