"""`quantized_norm` and `quantized_gated` in Triton: one program per row, which it holds in
registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.add_rms_norm.triton import normed_row
from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once, row_launch
from gpuscore_kernels.gated.triton import activated
from gpuscore_kernels.launch import next_power_of_two
from gpuscore_kernels.quantized.triton import checked_row, quantized_row


@triton.jit
def quantized_norm_kernel(
    x,
    delta,
    weight,
    total,
    q,
    scales,
    x_stride,
    delta_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    FP8: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        added = tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0)
        value = value.to(tl.float32) + added.to(tl.float32)
        tl.store(total + row * WIDTH + columns, value, mask=inside)
    normed = normed_row(value, weight, columns, inside, eps, WIDTH, ONE_PLUS)
    quantized, scale = quantized_row(normed.to(tl.float32), FP8)
    tl.store(q + row * WIDTH + columns, quantized, mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def quantized_gated_kernel(
    gate_up,
    q,
    scales,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    FP8: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start = gate_up + row * stride + columns
    gate = tl.load(start, mask=inside, other=0.0)
    up = tl.load(start + WIDTH, mask=inside, other=0.0)
    result = activated(gate, up, GELU)
    quantized, scale = quantized_row(result.to(tl.float32), FP8)
    tl.store(q + row * WIDTH + columns, quantized, mask=inside)
    tl.store(scales + row, scale)


@chosen_once
def _launch_norm(width: int, has_delta: bool, one_plus: bool, fp8: bool) -> CachedLaunch:
    constants = _sizes(width) | {"HAS_DELTA": has_delta, "ONE_PLUS": one_plus, "FP8": fp8}
    return row_launch(quantized_norm_kernel, constants, dtypes=(0, 2))


@chosen_once
def _launch_gated(width: int, gelu: bool, fp8: bool) -> CachedLaunch:
    return row_launch(quantized_gated_kernel, _sizes(width) | {"GELU": gelu, "FP8": fp8})


def _sizes(width: int) -> dict[str, int]:
    return {"WIDTH": width, "BLOCK": next_power_of_two(width)}


def quantized_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    one_plus: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + delta, and its norm in eight bits: `add_rms_norm`, then `quantize_rows`.

    Args:
        x, delta, weight, eps, one_plus: as for `add_rms_norm`.
        dtype: int8 or float8_e4m3fn.

    Returns:
        The sum [T, E] as `add_rms_norm` has it, q [T, E] and its scales [T].
    """
    (rows, width), fp8 = x.shape, dtype != torch.int8
    x = checked_row(x, width, fp8)
    q, scales = _results(x, width, dtype)
    total = x if delta is None else x.new_empty(rows, width, dtype=torch.float32)
    if rows == 0:
        return total, q, scales
    added = x if delta is None else delta if delta.stride(1) == 1 else delta.contiguous()
    tensors = (x, added, weight, total, q, scales)
    launch = _launch_norm(width, delta is not None, one_plus, fp8)
    launch((rows, 1), tensors, (x.stride(0), added.stride(0), eps))
    return total, q, scales


def quantized_gated(gate_up: Tensor, activation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return act(gate) * up in eight bits: `gated`, then `quantize_rows`.

    Args:
        gate_up, activation: as for `gated`.
        dtype: int8 or float8_e4m3fn.

    Returns:
        q [T, I] and its scales [T].
    """
    (rows, columns), fp8 = gate_up.shape, dtype != torch.int8
    width = columns // 2
    gate_up = checked_row(gate_up, width, fp8)
    q, scales = _results(gate_up, width, dtype)
    if rows:
        launch = _launch_gated(width, activation == "gelu_tanh", fp8)
        launch((rows, 1), (gate_up, q, scales), (gate_up.stride(0),))
    return q, scales


def _results(x: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q = torch.empty((len(x), width), dtype=dtype, device=x.device)
    return q, torch.empty(len(x), dtype=torch.float32, device=x.device)
