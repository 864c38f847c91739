"""How far the results of two correct kernels may differ by rounding."""

import torch
from torch import Tensor

# The largest allowed `relative_error`; that of a correct kernel is several times smaller.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return the norm of `got - expected`, divided by the norm of `expected`."""
    return float((got.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))
