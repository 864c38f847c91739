"""`add_rms_norm` in Triton: one program per row, which it holds in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once, row_launch

MAX_WIDTH = 32768  # 64 elements per thread of 16 warps


@triton.jit
def add_rms_norm_kernel(
    x,
    delta,
    weight,
    total,
    normed,
    x_stride,
    delta_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    ONE_PLUS: tl.constexpr,
):
    """Add and norm one row.

    Each program loads a row of x, and with HAS_DELTA adds delta and stores the sum. It sums
    squares, multiplies with their inverse root mean and with the weight, and rounds once.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    value = tl.load(x + row * x_stride + cols, mask=mask, other=0.0)
    if HAS_DELTA:
        added = tl.load(delta + row * delta_stride + cols, mask=mask, other=0.0)
        value = value.to(tl.float32) + added.to(tl.float32)
        tl.store(total + row * WIDTH + cols, value, mask=mask)
    x_hat = value.to(tl.float32)
    x_hat = x_hat * tl.rsqrt(tl.sum(x_hat * x_hat, axis=0) / WIDTH + eps)
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    if ONE_PLUS:
        w = 1.0 + w
    result = (x_hat * w).to(weight.dtype.element_ty)
    tl.store(normed + row * WIDTH + cols, result, mask=mask)


@chosen_once
def _launch(width: int, has_delta: bool, one_plus: bool) -> CachedLaunch:
    block = triton.next_power_of_2(width)
    constants = {"WIDTH": width, "BLOCK": block, "HAS_DELTA": has_delta, "ONE_PLUS": one_plus}
    return row_launch(add_rms_norm_kernel, constants, dtypes=(0, 2))


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, one_plus: bool = False
) -> tuple[Tensor, Tensor]:
    """Return x + delta, and its norm.

    Args:
        x: [T, E], float32 or in the weight's dtype; the elements of a row are contiguous, rows need
            not be.
        delta: [T, E] in the weight's dtype, in memory like x; None: 0.
        weight: [E].
        eps: added to the mean square.
        one_plus: Gemma's form: multiply by 1 + weight.

    Returns:
        The sum [T, E], float32 (x itself without a delta), and its norm [T, E], rounded once to the
        weight's dtype.
    """
    rows, width = x.shape
    if width > MAX_WIDTH:
        raise ValueError(f"a row has {width} elements; supported: {MAX_WIDTH}")
    x = x if x.stride(1) == 1 else x.contiguous()
    normed = weight.new_empty(rows, width)
    total = x if delta is None else x.new_empty(rows, width, dtype=torch.float32)
    if rows == 0:
        return total, normed
    added = x if delta is None else delta if delta.stride(1) == 1 else delta.contiguous()
    tensors = (x, added, weight, total, normed)
    launch = _launch(width, delta is not None, one_plus)
    launch((rows, 1), tensors, (x.stride(0), added.stride(0), eps))
    return total, normed
