"""Rows and products of eight bits against NumPy in integers and float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gpuscore_kernels.quantized import quantize_rows, quantized_product

DTYPES = torch.int8, torch.float8_e4m3fn


def rows(count: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(count * width)
    scale = torch.logspace(-3, 3, count)[:, None]
    return (torch.randn(count, width, generator=generator) * scale).to(dtype)


def test_int8_rows_have_254_steps_from_end_to_end_and_round_ties_to_even() -> None:
    x = torch.tensor([[127.0, -127.0, 2.5, 1.5, -0.5, 0.6], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    q, scale = quantize_rows(x, torch.int8, impl="reference")
    assert q.tolist() == [[127, -127, 2, 2, 0, 1], [0] * 6]
    assert scale.tolist() == [1.0, torch.finfo(torch.float32).eps]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_its_own_scale_and_is_near_what_it_was(dtype: torch.dtype) -> None:
    x = rows(7, 111)
    q, scale = quantize_rows(x, dtype, impl="reference")
    alone = [quantize_rows(row[None], dtype, impl="reference") for row in x]
    assert torch.equal(q.float(), torch.cat([row_q.float() for row_q, _ in alone]))
    assert torch.equal(scale, torch.cat([row_scale for _, row_scale in alone]))
    error = (q.float() * scale[:, None] - x.float()).abs()
    step = scale[:, None] * (0.51 if dtype == torch.int8 else 2.0**-10 + q.float().abs() / 16)
    assert bool((error <= step).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite_have_such_scales(dtype: torch.dtype) -> None:
    x = rows(3, 63)
    x[0, 5], x[1, 6] = torch.nan, -torch.inf
    _, scale = quantize_rows(x, dtype, impl="reference")
    assert scale.isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("bias", [False, True])
def test_int8_products_are_exact_sums_times_the_scales(bias: bool) -> None:
    count, outputs, width = 5, 63, 4099
    q = torch.full((count, width), -128, dtype=torch.int8)
    w = torch.full((outputs, width), 127, dtype=torch.int8)
    w[1::2] = torch.from_numpy(np.random.default_rng(0).integers(-128, 128, width, np.int8))
    scale_x, scale_w = torch.logspace(-2, 1, count), torch.logspace(-3, 0, outputs)
    added = rows(1, outputs)[0] if bias else None
    got = quantized_product(
        q, scale_x, w, scale_w, added, dtype=torch.bfloat16, impl="reference"
    )  # fmt: skip
    sums = q.numpy().astype(np.int64) @ w.numpy().astype(np.int64).T
    wanted = sums.astype(np.float32) * scale_w.numpy() * scale_x.numpy()[:, None]
    if added is not None:
        wanted = wanted + added.float().numpy()
    assert torch.equal(got, torch.from_numpy(wanted).bfloat16())


def test_sums_that_do_not_fit_are_refused() -> None:
    wide, scale = torch.zeros(1, 2**17, dtype=torch.int8), torch.ones(1)
    with pytest.raises(ValueError, match="131072 elements; sums of 131071 fit int32"):
        quantized_product(wide, scale, wide, scale, dtype=torch.float32, impl="reference")
