"""The residual stream plus a layer's output, and the RMS norm of the sum, in one pass."""

import torch
from torch import Tensor


def add_rms_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    one_plus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return x + delta, and its norm.

    Args:
        x: [T, E], float32 or in the weight's dtype; the elements of a row are contiguous, rows need
            not be.
        delta: [T, E] in the weight's dtype, as x in memory, or None for 0.
        weight: [E].
        eps: added to the mean square.
        one_plus: Gemma's form: multiply by 1 + weight.

    Returns:
        The sum [T, E], float32 (x itself without a delta), and its norm [T, E], rounded once to the
        weight's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_rows(x, delta, weight)
    from gpuscore_kernels.add_rms_norm import triton  # only where Triton is

    return triton.add_rms_norm(x, delta, weight, eps, one_plus)


def check_rows(x: Tensor, delta: Tensor | None, weight: Tensor) -> None:
    """Raise ValueError unless shapes and dtypes fit."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    if x.dim() != 2 or x.shape[1:] != weight.shape or x.dtype not in (wide, weight.dtype):
        raise ValueError(
            f"shapes or dtypes do not fit: x {tuple(x.shape)} {x.dtype}, "
            f"weight {tuple(weight.shape)} {weight.dtype}"
        )
    if delta is not None and (delta.shape != x.shape or delta.dtype != weight.dtype):
        raise ValueError(
            f"delta must be {tuple(x.shape)} {weight.dtype}, got {tuple(delta.shape)} {delta.dtype}"
        )
