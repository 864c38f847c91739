"""`qk_norm_rope_store` in Triton: one program per row and block of heads, halves side by side.

Values stay where the QKV product has put them: only those of rows that are kept are read.
"""

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.dependent_launch import let_next_kernel_begin, wait_for_kernel_before
from gpuscore_kernels.launch import next_power_of_two, pdl_option, row_warps
from gpuscore_kernels.qk_norm_rope_store import Pages
from gpuscore_kernels.variant import Variant, as_launched

BLOCK = 1024  # elements of a program, approximately


@triton.jit
def normed(left, right, weight, head_dim, eps, half, inside, ONE_PLUS: tl.constexpr):
    """Return both halves [heads, D / 2] of normed heads."""
    mean = (tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)) / head_dim
    factor = tl.rsqrt(mean + eps)[:, None]
    scale_left = tl.load(weight + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    scale_right = tl.load(weight + head_dim // 2 + half, mask=inside, other=0.0).to(tl.float32)
    if ONE_PLUS:
        scale_left, scale_right = (1.0 + scale_left), (1.0 + scale_right)
    return left * factor * scale_left, right * factor * scale_right[None, :]


@triton.jit
def turned(raw_left, raw_right, left, right, c, s, is_v):
    """Return both halves of heads rotated, by the cosines c and sines s, or raw those of values."""
    turned_left, turned_right = left * c - right * s, right * c + left * s
    return tl.where(is_v, raw_left, turned_left), tl.where(is_v, raw_right, turned_right)


@triton.jit
def put(start, half, left, right, mask, HALF: tl.constexpr):
    """Store both halves of heads at the pointers `start` [heads, 1]."""
    dtype = start.dtype.element_ty
    tl.store(start + half[None, :], left.to(dtype), mask=mask)
    tl.store(start + HALF + half[None, :], right.to(dtype), mask=mask)


@triton.jit
def qk_norm_rope_store_kernel(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    q,
    k,
    k_pages,
    v_pages,
    slots,
    qkv_stride,
    head_stride,
    slot_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    HAS_PAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_kernel_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    half = tl.arange(0, BLOCK_HALF)
    inside = half < HALF
    is_q, is_v = (head < HEADS)[:, None], (head >= HEADS + KV_HEADS)[:, None]
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    if HAS_PAGES:
        slot = tl.load(slots + row).to(tl.int64)
        mask = mask & (~is_v | (slot >= 0))
    else:
        mask = mask & ~is_v
    start = qkv + row * qkv_stride + head[:, None] * (2 * HALF) + half[None, :]
    raw_left = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    raw_right = tl.load(start + HALF, mask=mask, other=0.0).to(tl.float32)

    left, right = raw_left, raw_right
    if HAS_NORM:
        if KV_HEADS > 0:
            left, right = normed(raw_left, raw_right, k_norm, 2 * HALF, eps, half, inside, ONE_PLUS)
        if HEADS > 0:
            q_left, q_right = normed(
                raw_left, raw_right, q_norm, 2 * HALF, eps, half, inside, ONE_PLUS
            )
            left, right = tl.where(is_q, q_left, left), tl.where(is_q, q_right, right)
    c = tl.load(cos + row * HALF + half, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + row * HALF + half, mask=inside, other=0.0)[None, :]
    left, right = turned(raw_left, raw_right, left, right, c, s, is_v)

    k_head, v_head = head - HEADS, head - HEADS - KV_HEADS
    is_k = ~is_q & ~is_v
    let_next_kernel_begin(PDL)
    if HEADS > 0:
        to_q = q + (row * HEADS + head[:, None]) * (2 * HALF)
        put(to_q, half, left, right, mask & is_q, HALF)
    if KV_HEADS > 0:
        to_k = k + (row * KV_HEADS + k_head[:, None]) * (2 * HALF)
        put(to_k, half, left, right, mask & is_k, HALF)
        if HAS_PAGES:
            kept = mask & (slot >= 0)
            wide_k, wide_v = k_head.to(tl.int64)[:, None], v_head.to(tl.int64)[:, None]
            page_k = k_pages + wide_k * head_stride + slot * slot_stride
            put(page_k, half, left, right, kept & is_k, HALF)
            page_v = v_pages + wide_v * head_stride + slot * slot_stride
            put(page_v, half, left, right, kept & is_v, HALF)


def _constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_norm: bool,
    one_plus: bool,
    has_pages: bool,
) -> tuple[dict[str, int], int]:
    """Return compile-time arguments, and the heads of a row that programs compute."""
    heads, half = num_heads + (1 + has_pages) * num_kv_heads, next_power_of_two(head_dim // 2)
    return {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HALF": head_dim // 2,
        "BLOCK_HEADS": min(next_power_of_two(heads), max(1, BLOCK // (2 * half))),
        "BLOCK_HALF": half,
        "HAS_NORM": has_norm,
        "ONE_PLUS": one_plus,
        "HAS_PAGES": has_pages,
    }, heads


def _warps(constants: dict[str, int]) -> int:
    return row_warps(2 * constants["BLOCK_HEADS"] * constants["BLOCK_HALF"])


@chosen_once
def _launch(pdl: bool, *choices: Any) -> tuple[CachedLaunch, int]:
    """Return the launch for the arguments of `_constants`, and the number of programs of a row."""
    constants, heads = _constants(*choices)
    launch = CachedLaunch(
        qk_norm_rope_store_kernel,
        constants | {"PDL": pdl},
        {"num_warps": _warps(constants)} | pdl_option(pdl),
        dtypes=(0, 1, 2, 3, 4, 7, 8, 9),  # q and k are made here
    )
    return launch, triton.cdiv(heads, constants["BLOCK_HEADS"])


def qk_norm_rope_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    sizes: tuple[int, int, int],
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    one_plus: bool,
    pages: Pages | None,
    pdl: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; `sizes` are H, Hkv and D."""
    num_heads, num_kv_heads, head_dim = sizes
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    rows = qkv.shape[0]
    q = qkv.new_empty(rows, num_heads, head_dim)
    k = qkv.new_empty(rows, num_kv_heads, head_dim)
    v = qkv[:, (num_heads + num_kv_heads) * head_dim :].view(rows, num_kv_heads, head_dim)
    if rows == 0 or num_heads + num_kv_heads == 0:
        return q, k, v
    norms = (qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm)
    stores = (k, k, cos) if pages is None else (pages.k, pages.v, pages.slots.contiguous())
    strides = (0, 0) if pages is None else pages.k.stride()[:2]
    launch, programs = _launch(pdl, *sizes, q_norm is not None, one_plus, pages is not None)
    launch(
        (rows, programs),
        (qkv, cos.contiguous(), sin.contiguous(), *norms, q, k, *stores),
        (qkv.stride(0), *strides, eps),
    )
    return q, k, v


def variants() -> Iterator[Variant]:
    pointers = ("qkv", "q_norm", "k_norm", "q", "k", "k_pages", "v_pages")
    types = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(("cos", "sin"), "*fp32")
    strides = ("qkv_stride", "head_stride", "slot_stride")
    types |= {"slots": "*i32", "eps": "fp32"} | dict.fromkeys(strides, "i32")
    for heads, kv_heads, head_dim, has_norm, one_plus, quick in (
        (16, 8, 128, True, False, (80, 89, 90, 120)),  # Qwen3-0.6B
        (0, 8, 128, True, False, ()),  # its last layer
        (16, 0, 128, True, False, ()),
        (32, 8, 64, False, False, ()),  # Llama 3.2 1B
        (32, 32, 96, False, False, ()),  # Phi-3
        (8, 4, 256, True, True, (90,)),  # Gemma 3 4B
    ):
        constants, _ = _constants(heads, kv_heads, head_dim, has_norm, one_plus, kv_heads > 0)
        variant = Variant(
            name=f"heads={heads}/{kv_heads}x{head_dim} norm={has_norm} one_plus={one_plus}",
            kernel=qk_norm_rope_store_kernel,
            signature=types,
            constexprs=constants,
            divisible=(*pointers, "cos", "sin", "slots", *strides),
            num_warps=_warps(constants),
            num_stages=3,
            quick=quick,
        )
        yield from as_launched([variant])
