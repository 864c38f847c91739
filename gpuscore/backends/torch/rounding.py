"""The distance that two computations of the same numbers may have."""

import torch
from torch import Tensor

# Largest norm of the error over the norm of the answer; a correct kernel stays several times lower.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return the norm of the error over the norm of the answer."""
    return float((got.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))
