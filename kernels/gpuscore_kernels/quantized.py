"""Rows of INT8 in plain torch, and scales of checkpoints.

A row's largest magnitude becomes 127, as in vLLM; a row of zeros has the scale `EPS`.
compressed-tensors divides by 127.5 instead, which puts a row's largest number half way between two
integers. A rounding error would then decide between them, and packed rows would differ from rows of
single requests.
"""

import torch
from torch import Tensor

MOST = 127.0  # a row's largest magnitude
EPS = torch.finfo(torch.float32).eps
BLOCK = 128  # rows and columns of a weight that share a scale, where its scales are a matrix


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [T, K] in int8 with a scale per row, [T]; rounds to nearest, ties to even.

    A row with NaN or infinity gets a scale of NaN or infinity; its numbers are undefined.
    """
    wide = x.float()
    scale = wide.abs().amax(1) / MOST
    scale = torch.where(scale == 0, EPS, scale)
    return (wide / scale[:, None]).clamp(-MOST, MOST).round().to(torch.int8), scale


def spread(scale: Tensor, w: Tensor) -> Tensor:
    """Expand a weight's scales, one per block of 128 x 128, to one per element of w [O, K]."""
    rows, columns = w.shape
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
