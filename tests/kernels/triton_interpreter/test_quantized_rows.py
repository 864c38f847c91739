"""Promise: norm and activation with quantised results give the bits of the one kernel and then the
other."""

import importlib

import pytest
import torch

from gpuscore_kernels.add_rms_norm.triton import add_rms_norm
from gpuscore_kernels.gated.triton import gated
from gpuscore_kernels.quantized import quantize_rows
from support.kernels import DTYPES, between_nans, planted, randn
from support.slow import slow


def kernels():
    """Return the kernels' module, which `planted` replaces."""
    return importlib.import_module("gpuscore_kernels.quantized_rows.triton")


def equal(got, expected):
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "one_plus"),
    [(5, 63, False), *slow((1, 1, True), (3, 128, True), (0, 16, False))],
)
def test_a_norm(rows, width, one_plus, dtype):
    narrow, delta = (between_nans(randn(rows, width, dtype=dtype, seed=s)) for s in (1, 2))
    weight = 1 + randn(width, dtype=dtype)
    options = {"eps": 1e-3, "one_plus": one_plus}
    stream = between_nans(randn(rows, width, seed=3))
    for x, added in ((narrow, delta), (narrow, None), (stream, delta), (stream, None)):
        total, normed = add_rms_norm(x, added, weight, **options)
        expected = total, *quantize_rows(normed, torch.int8, impl="triton")
        assert equal(
            kernels().quantized_norm(x, added, weight, dtype=torch.int8, **options), expected
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "activation"),
    [(5, 63, "silu"), *slow((1, 1, "silu"), (2, 1111, "gelu_tanh"), (0, 16, "silu"))],
)
def test_an_activation(rows, width, activation, dtype):
    gate_up = between_nans(4 * randn(rows, 2 * width, dtype=dtype))
    got = kernels().quantized_gated(gate_up, activation, torch.int8)
    expected = quantize_rows(gated(gate_up, activation), torch.int8, impl="triton")
    assert equal(got, expected)


def odd_norm():
    test_a_norm(5, 63, False, torch.float16)


def odd_activation():
    test_an_activation(5, 63, "silu", torch.float16)


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("quantized_row(normed.to", "quantized_row(value.to", odd_norm),
        *slow(
            ("columns < WIDTH", "columns <= WIDTH", odd_activation),
            ("start + WIDTH, mask", "start + BLOCK, mask", odd_activation),
            (
                "added = tl.load(delta + row * delta_stride",
                "added = tl.load(delta + row",
                odd_norm,
            ),
        ),
    ],
)
def test_a_defect_is_visible(old, new, check, monkeypatch, tmp_path):
    with planted(monkeypatch, kernels(), old, new, tmp_path), pytest.raises(AssertionError):
        check()
