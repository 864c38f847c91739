"""Linear layers of eight bits: products of rows, quantised as they come, and quantised weights.

A row's scale depends on that row alone, so its result does not depend on other rows in a batch.
"""

import torch
from torch import Tensor

from gpuscore_kernels import Implementation
from gpuscore_kernels.quantized import reference

MAX_SUMMANDS = 2**17 - 1  # of products of int8, each at most 2^14, whose sums fit int32


def quantize_rows(x: Tensor, dtype: torch.dtype, *, impl: Implementation) -> tuple[Tensor, Tensor]:
    """Return rows in eight bits, and their scales.

    Args:
        x: [T, K]; the elements of a row are contiguous, rows need not be.
        dtype: int8 or float8_e4m3fn.
        impl: "reference" (any device) or "triton".

    Returns:
        q [T, K] and scale [T] in float32: q times scale is nearly x. The scale is the row's largest
        magnitude over 127 (int8) or 448, and float32's eps for a
        row of zeros. A row with NaN or infinity has such a scale; its q is not defined.
    """
    if impl == "reference":
        return reference.quantize_rows(x, dtype)
    from gpuscore_kernels.quantized import triton

    return triton.quantize_rows(x, dtype)


def quantized_product(
    q: Tensor,
    scale_x: Tensor,
    w: Tensor,
    scale_w: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    impl: Implementation,
) -> Tensor:
    """Return the product of quantised rows with a quantised weight.

    Args:
        q: [T, K], int8 or float8_e4m3fn, contiguous; K of int8 is at most `MAX_SUMMANDS`.
        scale_x: [T], float32.
        w: [O, K] in q's dtype, contiguous.
        scale_w: [O], float32.
        bias: [O] in `dtype`, or None.
        dtype: of the result.
        impl: "reference" (any device) or "triton" (int8; `fp8` has what cards do in float8_e4m3fn).

    Returns:
        [T, O]: float32(q w') * scale_w * scale_x + bias, multiplied in this order in float32 and
        rounded to `dtype` once. Sums of int8 are exact.

    Raises:
        ValueError: a row has so many elements that sums do not fit int32.
    """
    if q.dtype == torch.int8 and q.shape[1] > MAX_SUMMANDS:
        raise ValueError(f"a row has {q.shape[1]} elements; sums of {MAX_SUMMANDS} fit int32")
    if impl == "reference":
        return reference.quantized_product(q, scale_x, w, scale_w, bias, dtype)
    from gpuscore_kernels.quantized import triton

    return triton.quantized_product(q, scale_x, w, scale_w, bias, dtype)
