"""Helpers for the tests of Triton kernels: the device, comparison."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpuscore.config import ModelConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# Triton's interpreter multiplies bfloat16 numbers as bit patterns, so they are left out there.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def in_triton(directory: Path, **settings: Any) -> ModelConfig:
    """Return a small model's configuration with Triton's attention and kernels, in float32."""
    small = {"max_batch_tokens": 128, "max_model_len": 64, "kv_cache_size": 2**22}
    kinds = {"device": DEVICE, "dtype": "float32", "attention": "triton", "kernels": "triton"}
    return ModelConfig(str(directory), **(kinds | small | settings))


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return random numbers that are the same on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def between_nans(x: Tensor) -> Tensor:
    """Return `x` [T, E] within a larger tensor of NaN, so that reads beside it become visible."""
    around = torch.full((len(x) + 2, x.shape[1] + 48), torch.nan, dtype=x.dtype, device=x.device)
    around[1:-1, 16:-32] = x
    return around[1:-1, 16:-32]


def assert_near(
    got: Tensor, expected: Tensor, dtype: torch.dtype, most: float | None = None
) -> None:
    """Assert a small |got - expected| / |expected| in float64, the norm over all elements."""
    assert got.shape == expected.shape
    if expected.numel():
        error = (got.double() - expected.double()).norm() / expected.double().norm()
        assert error <= (most or TOLERANCE[dtype]), f"relative error {error:.2e}"
