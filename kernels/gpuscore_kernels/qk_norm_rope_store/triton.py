"""`qk_norm_rope_store` in Triton: one program per row and block of heads, halves side by side.

A program has a block of query heads, or of KV heads with both their keys and their values. Values
stay where the QKV product has put them: only values of rows that are kept are read. Where cached
rows follow the batch's, all values are read and written, and further programs copy cached rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.qk_norm_rope_store import Pages
from gpuscore_kernels.reference import QkvHeads

BLOCK = 2048  # elements of a program at most: 16 heads of 128
# Of a thread, so that both sides of eight KV heads have eight each: 128 bits in half precision, the
# widest load.
ELEMENTS = 32
COPIED = tl.constexpr(16)  # cached rows that the programs of one row copy
ZEROS = tl.constexpr(-1)  # in place of a slot: the row becomes zeros; below: it is not written


@triton.jit
def normed(left, right, weight, half, eps, HALF: tl.constexpr, ONE_PLUS: tl.constexpr):
    """Return both halves [heads, D / 2] of normed heads."""
    inside = half < HALF
    mean = (tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)) / (2 * HALF)
    factor = tl.rsqrt(mean + eps)[:, None]
    scale_left = tl.load(weight + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    scale_right = tl.load(weight + HALF + half, mask=inside, other=0.0).to(tl.float32)
    if ONE_PLUS:
        scale_left = 1.0 + scale_left
        scale_right = 1.0 + scale_right
    return left * factor * scale_left, right * factor * scale_right[None, :]


@triton.jit
def load_halves(start, half, mask, HALF: tl.constexpr):
    """Load both halves of heads at the pointers `start` [heads, 1], float32."""
    left = tl.load(start + half[None, :], mask=mask, other=0.0).to(tl.float32)
    right = tl.load(start + HALF + half[None, :], mask=mask, other=0.0).to(tl.float32)
    return left, right


@triton.jit
def norm_and_rotate(
    start,
    weight,
    half,
    mask,
    cos,
    sin,
    eps,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ONE_PLUS: tl.constexpr,
):
    """Return both halves of heads, normed and rotated by cosines and sines."""
    left, right = load_halves(start, half, mask, HALF)
    if HAS_NORM:
        left, right = normed(left, right, weight, half, eps=eps, HALF=HALF, ONE_PLUS=ONE_PLUS)
    return left * cos - right * sin, right * cos + left * sin


@triton.jit
def store_halves(start, half, of_heads, mask, HALF: tl.constexpr):
    """Store both halves of heads at the pointers `start` [heads, 1]."""
    left, right = of_heads
    dtype = start.dtype.element_ty
    tl.store(start + half[None, :], left.to(dtype), mask=mask)
    tl.store(start + HALF + half[None, :], right.to(dtype), mask=mask)


@triton.jit
def copy_cached(read, rows, pages, strides, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Copy keys and values of `COPIED` slots to consecutive rows, some by each program of a row."""
    k, v = rows
    k_pages, v_pages = pages
    head_stride, slot_stride = strides
    head = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    at = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    inside = (head < HEADS) & (at < DIM)
    for index in tl.range(tl.program_id(1), COPIED, tl.num_programs(1)):
        slot = tl.load(read + index).to(tl.int64)
        if slot >= ZEROS:
            place = head * head_stride + slot * slot_stride + at
            cached = inside & (slot >= 0)
            key = tl.load(k_pages + place, mask=cached, other=0.0)
            value = tl.load(v_pages + place, mask=cached, other=0.0)
            fine = tl.sum(value.to(tl.float32) * 0.0, axis=1)[:, None] == 0.0
            to = index * (HEADS * DIM) + head * DIM + at
            tl.store(k + to, tl.where(fine, key, float("nan")), mask=inside)
            tl.store(v + to, tl.where(fine, value, 0.0), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def qk_norm_rope_store_kernel(
    qkv,
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
    read,
    rows,
    qkv_stride,
    head_stride,
    slot_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    HAS_PAGES: tl.constexpr,
    ALL: tl.constexpr,
    READS: tl.constexpr,
):
    """Norm, rotate and store a block of heads of one row.

    Each program loads cosines and sines of its row. Programs of queries norm and rotate both halves
    of their heads. Programs of KV heads do the same with keys, and check whether all values are
    finite; then they store keys and values packed, and in pages. With READS, programs behind the
    batch's rows copy cached rows instead.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if READS:  # noqa: SIM102  (only one of the two is known when it is compiled)
        if row >= rows:
            first = (row - rows) * COPIED
            behind = (rows + first) * (KV_HEADS * 2 * HALF)
            copy_cached(
                read + first, (k + behind, v + behind), (k_pages, v_pages),
                (head_stride, slot_stride), HEADS=KV_HEADS, DIM=2 * HALF,
            )  # fmt: skip
            return
    q_blocks: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    half = tl.arange(0, triton.next_power_of_2(HALF))
    inside = half < HALF
    cos_row = tl.load(cos + row * HALF + half, mask=inside, other=0.0)[None, :]
    sin_row = tl.load(sin + row * HALF + half, mask=inside, other=0.0)[None, :]
    start = qkv + row * qkv_stride
    if block < q_blocks:
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        place = head[:, None] * (2 * HALF)
        mask = (head < HEADS)[:, None] & inside[None, :]
        of_heads = norm_and_rotate(
            start + place, q_norm, half, mask, cos=cos_row, sin=sin_row, eps=eps,
            HALF=HALF, HAS_NORM=HAS_NORM, ONE_PLUS=ONE_PLUS,
        )  # fmt: skip
        store_halves(q + row * (HEADS * 2 * HALF) + place, half, of_heads, mask, HALF=HALF)
    else:
        kv_head = (block - q_blocks) * BLOCK_KV + tl.arange(0, BLOCK_KV)
        at = kv_head[:, None] * (2 * HALF)
        kept = (kv_head < KV_HEADS)[:, None] & inside[None, :]
        from_k = start + HEADS * 2 * HALF + at
        k_left, k_right = norm_and_rotate(
            from_k, k_norm, half, kept, cos=cos_row, sin=sin_row, eps=eps,
            HALF=HALF, HAS_NORM=HAS_NORM, ONE_PLUS=ONE_PLUS,
        )  # fmt: skip
        to_k = k + row * (KV_HEADS * 2 * HALF) + at
        real = kept
        if HAS_PAGES:
            slot = tl.load(slots + row).to(tl.int64)
            kept = kept & (slot >= 0)
        checked = real if ALL else kept
        from_v = from_k + KV_HEADS * 2 * HALF
        v_left, v_right = load_halves(from_v, half, checked, HALF)
        # 0 times infinity is NaN, as 0 times NaN is.
        fine = tl.sum(v_left * 0.0 + v_right * 0.0, axis=1)[:, None] == 0.0
        key = tl.where(fine, k_left, float("nan")), tl.where(fine, k_right, float("nan"))
        value = tl.where(fine, v_left, 0.0), tl.where(fine, v_right, 0.0)
        store_halves(to_k, half, key, real, HALF=HALF)
        if READS:
            store_halves(v + row * (KV_HEADS * 2 * HALF) + at, half, value, real, HALF=HALF)
        else:
            store_halves(from_v, half, value, checked & ~fine, HALF=HALF)
        if HAS_PAGES:
            page = kv_head.to(tl.int64)[:, None] * head_stride + slot * slot_stride
            store_halves(k_pages + page, half, key, kept, HALF=HALF)
            store_halves(v_pages + page, half, value, kept, HALF=HALF)


@chosen_once
def _launch(
    sizes: tuple[int, int, int],
    has_norm: bool,
    one_plus: bool,
    has_pages: bool,
    checks_all: bool,
    reads: bool,
) -> tuple[CachedLaunch, int]:
    """Return the launch for H, Hkv and D, and the number of programs of a row."""
    num_heads, num_kv_heads, head_dim = sizes
    half = triton.next_power_of_2(head_dim // 2)
    most = max(2, BLOCK // (2 * half))  # heads of a program; half of them have keys
    of_queries = min(triton.next_power_of_2(max(1, num_heads)), most)
    of_keys = min(triton.next_power_of_2(max(1, num_kv_heads)), most // 2)
    constants = {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HALF": head_dim // 2,
        "BLOCK_HEADS": of_queries,
        "BLOCK_KV": of_keys,
        "HAS_NORM": has_norm,
        "ONE_PLUS": one_plus,
        "HAS_PAGES": has_pages,
        "ALL": checks_all,
        "READS": reads,
    }
    warps = 2 * max(of_queries, 2 * of_keys) * half // (32 * ELEMENTS)
    launch = CachedLaunch(
        qk_norm_rope_store_kernel,
        constants,
        {"num_warps": min(16, max(1, warps))},
        unspecialized=1,
        dtypes=(0, 1, 2, 3, 4, 8, 9, 10),  # q, k and v are made here, and `read` is int32
    )
    return launch, triton.cdiv(num_heads, of_queries) + triton.cdiv(num_kv_heads, of_keys)


def qk_norm_rope_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: QkvHeads, pages: Pages | None
) -> tuple[Tensor, Tensor, Tensor]:
    num_heads = heads.queries
    num_kv_heads = heads.keys
    head_dim = 2 * cos.shape[1]
    q_norm = heads.q_norm
    k_norm = heads.k_norm
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    rows = qkv.shape[0]
    read = None if pages is None else pages.read
    cached = 0 if read is None else read.shape[0]
    q = qkv.new_empty(rows, num_heads, head_dim)
    k = qkv.new_empty(rows + cached, num_kv_heads, head_dim)
    v = qkv[:, (num_heads + num_kv_heads) * head_dim :].view(rows, num_kv_heads, head_dim)
    v = torch.empty_like(k) if cached else v
    if rows == 0 or num_heads + num_kv_heads == 0:
        return q, k, v
    norms = (qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm)
    stores = (k, k, cos) if pages is None else (pages.k, pages.v, pages.slots.contiguous())
    strides = (0, 0) if pages is None else pages.k.stride()[:2]
    sizes = (num_heads, num_kv_heads, head_dim)
    norm = (q_norm is not None, heads.one_plus)
    launch, programs = _launch(sizes, *norm, pages is not None, read is not None, cached > 0)
    launch(
        (rows + cached // COPIED.value, programs),
        (
            qkv,
            cos.contiguous(),
            sin.contiguous(),
            *norms,
            q,
            k,
            v,
            *stores,
            k if read is None else read,
        ),
        (rows, qkv.stride(0), *strides, heads.eps),
    )
    return q, k, v
