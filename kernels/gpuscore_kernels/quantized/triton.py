"""`quantize_rows` and `quantized_product` of int8 in Triton.

A row is quantised by one program, which holds it in registers. The product's sums are int32, on
tensor cores; scales and bias follow before it is stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once, row_launch
from gpuscore_kernels.launch import INTERPRETER, arch_of, next_power_of_two
from gpuscore_kernels.quantized.config import Int8Tiles, config_for

MAX_WIDTH = 32768  # 64 elements per thread of 16 warps
FIRST_WITH_FP8 = 89
EPS = tl.constexpr(torch.finfo(torch.float32).eps)
# Added to a small float32 number and subtracted again, it rounds to an integer, ties to even.
INTEGERS = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quantized_row(wide, FP8: tl.constexpr):
    """Return a row [BLOCK] in float32, with 0 behind its end, as eight bits, and its scale."""
    largest = tl.reduce(tl.abs(wide), 0, _larger)
    scale = tl.div_rn(largest, 448.0 if FP8 else 127.0)
    scale = tl.where(scale == 0.0, EPS, scale)
    quotient = tl.div_rn(wide, scale)
    if FP8:
        quantized = tl.clamp(quotient, -448.0, 448.0).to(tl.float8e4nv)
    else:
        quantized = ((tl.clamp(quotient, -127.0, 127.0) + INTEGERS) - INTEGERS).to(tl.int8)
    return quantized, scale


@triton.jit
def quantize_rows_kernel(
    x,
    q,
    scales,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    quantized, scale = quantized_row(value.to(tl.float32), FP8)
    tl.store(q + row * WIDTH + columns, quantized, mask=inside)
    tl.store(scales + row, scale)


# If specialised, Triton would compile different code for 1 row, multiples of 16 and other numbers.
@triton.jit(do_not_specialize=["num_rows"])
def int8_product_kernel(
    q,
    scale_x,
    w,
    scale_w,
    bias,
    out,
    num_rows,
    outputs,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_rows, column < outputs
    k = tl.arange(0, BLOCK_K)
    wide = row.to(tl.int64)[:, None]
    rows = q + wide * width + k[None, :]
    columns = w + column.to(tl.int64)[:, None] * width + k[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    # `width` is not a compile-time constant, because the loop over it would be unrolled.
    for start in range(0, width, BLOCK_K):
        a_mask, b_mask = is_row[:, None], is_column[:, None]
        if not EVEN_K:
            inside = (start + k < width)[None, :]
            a_mask, b_mask = a_mask & inside, b_mask & inside
        a = tl.load(rows + start, mask=a_mask, other=0)
        b = tl.load(columns + start, mask=b_mask, other=0)
        sums = tl.dot(a, tl.trans(b), sums, out_dtype=tl.int32)
    y = sums.to(tl.float32) * tl.load(scale_w + column, mask=is_column, other=0.0)[None, :]
    y = y * tl.load(scale_x + row, mask=is_row, other=0.0)[:, None]
    if HAS_BIAS:
        y += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = out + wide * outputs + column[None, :]
    tl.store(place, y.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@chosen_once
def _launch_rows(width: int, fp8: bool) -> CachedLaunch:
    constants = {"WIDTH": width, "BLOCK": next_power_of_two(width), "FP8": fp8}
    return row_launch(quantize_rows_kernel, constants)


@chosen_once
def _launch_product(config: Int8Tiles, even: bool, bias: bool) -> CachedLaunch:
    return CachedLaunch(
        int8_product_kernel,
        config.sizes() | {"EVEN_K": even, "HAS_BIAS": bias},
        config.options(),
        free=1,
        dtypes=(5,),  # which is also the bias' dtype
    )


def checked_row(x: Tensor, width: int, fp8: bool) -> Tensor:
    """Return rows x with contiguous elements; `width` elements of each row become eight bits.

    Raises:
        ValueError: a row is too wide, or the device has no such numbers.
    """
    if width > MAX_WIDTH:
        raise ValueError(f"a row has {width} elements; supported: {MAX_WIDTH}")
    arch = arch_of(x)
    if fp8 and INTERPRETER < arch < FIRST_WITH_FP8:
        raise ValueError(f"sm_{arch} has no float8_e4m3fn; sm_{FIRST_WITH_FP8} has it")
    return x if x.stride(1) == 1 else x.contiguous()


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    (rows, width), fp8 = x.shape, dtype != torch.int8
    x = checked_row(x, width, fp8)
    q = torch.empty((rows, width), dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        _launch_rows(width, fp8)((rows, 1), (x, q, scales), (x.stride(0),))
    return q, scales


def quantized_product(
    q: Tensor,
    scale_x: Tensor,
    w: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if q.dtype != torch.int8:
        raise ValueError(f"the product in Triton is for int8, not for {q.dtype}")
    (rows, width), outputs = q.shape, len(w)
    out = torch.empty((rows, outputs), dtype=dtype, device=q.device)
    if out.numel() == 0:
        return out
    config = config_for(arch_of(q), rows)
    launch = _launch_product(config, width % config.BLOCK_K == 0, bias is not None)
    launch(
        (-(-rows // config.BLOCK_M), -(-outputs // config.BLOCK_N)),
        (q, scale_x, w, scale_w, w if bias is None else bias, out),
        (rows, outputs, width),
    )
    return out
