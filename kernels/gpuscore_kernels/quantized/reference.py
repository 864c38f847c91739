"""Rows and products of eight bits in plain torch.

A row's largest magnitude becomes 127 in int8, as vLLM has it, and 448 in float8_e4m3fn, its largest
number; a row of zeros has the scale `EPS`. compressed-tensors divides by 127.5 instead, so that a
row's largest number is half way between two integers: its last bit would decide between them, and
packed rows would differ from rows of single requests.
"""

import torch
from torch import Tensor

STEPS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # of a row's largest magnitude
LIMITS = {torch.int8: (-127.0, 127.0), torch.float8_e4m3fn: (-448.0, 448.0)}
EPS = torch.finfo(torch.float32).eps
BLOCK = 128  # rows and columns of a weight that share a scale, where its scales are a matrix


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x [T, K] in `dtype` with a scale per row; rounds to nearest, ties to even."""
    wide = x.float()
    # By a tensor, because on CUDA torch multiplies by the rounded reciprocal of a number.
    scale = wide.abs().amax(1) / wide.new_full((), STEPS[dtype])
    scale = torch.where(scale == 0, EPS, scale)
    quotient = (wide / scale[:, None]).clamp(*LIMITS[dtype])
    if dtype == torch.int8:
        quotient = quotient.round()
    return quotient.to(dtype), scale


def quantized_product(
    q: Tensor, scale_x: Tensor, w: Tensor, scale_w: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return q w' [T, O] times the scales, plus the bias, in float32 and then rounded to `dtype`.

    Sums are float64, in which sums of integers are exact.
    """
    y = (q.double() @ w.double().T).float() * scale_w * scale_x[:, None]
    return (y if bias is None else y + bias.float()).to(dtype)


def spread(scale: Tensor, w: Tensor) -> Tensor:
    """Return a weight's scales [O / 128, K / 128], rounded up, as one per element of w [O, K]."""
    rows, columns = w.shape
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
