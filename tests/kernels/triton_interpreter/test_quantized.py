"""Promise: rows and products of eight bits equal their references bit by bit, apart from what a
device may fuse: a multiplication and the addition of a bias."""

import importlib

import pytest
import torch

from gpuscore_kernels.quantized import quantize_rows, quantized_product
from support.kernels import DEVICE, DTYPES, INTERPRETED, between_nans, planted, randn
from support.slow import slow


def eight_bits(rows, width, seed=0):
    """Return int8 numbers with both extremes, between others."""
    generator = torch.Generator().manual_seed(seed)
    around = torch.randint(-128, 128, (rows + 2, width), generator=generator).to(torch.int8)
    around[1:-1:2] = around[1:-1:2].sign() * 127 - (around[1:-1:2] < 0).to(torch.int8)
    return around.to(DEVICE)[1:-1]


def scales(count, seed):
    around = torch.full((count + 2,), torch.nan, device=DEVICE)
    around[1:-1] = 0.01 + randn(count, seed=seed).abs()
    return around[1:-1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 63), *slow((3, 1111), (0, 16))])
def test_rows_in_int8(rows, width, dtype):
    x = between_nans(randn(rows, width, dtype=dtype) * 10.0 ** randn(rows, 1, seed=1))
    x[2:3] = 0
    got, expected = (quantize_rows(x, torch.int8, impl=impl) for impl in ("triton", "reference"))
    assert [result.dtype for result in got] == [torch.int8, torch.float32]
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_ties_are_rounded_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -127.0]], device=DEVICE)
    q, _ = quantize_rows(x, torch.int8, impl="triton")
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126, -127]]


def test_rows_in_float8():
    """Numbers that float8_e4m3fn holds, because Triton's interpreter rounds others wrongly."""
    held = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = (torch.cat((held, -held))[None] * torch.tensor([[2.0], [0.5], [0.0]])).to(DEVICE)
    if not INTERPRETED:
        x = torch.cat((x, randn(3, x.shape[1])))
    x = between_nans(x)
    got, expected = (
        quantize_rows(x, torch.float8_e4m3fn, impl=impl) for impl in ("triton", "reference")
    )
    assert got[0].dtype == torch.float8_e4m3fn
    assert torch.equal(got[0].float(), expected[0].float())
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_rows_that_are_not_finite_have_such_scales(dtype):
    x = randn(4, 63)
    x[0, 5], x[1, 62], x[2, 0] = torch.nan, -torch.inf, torch.nan
    _, got = quantize_rows(x, dtype, impl="triton")
    assert got.isnan().tolist() == [True, False, True, False]
    assert got.isinf().tolist() == [False, True, False, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "outputs", "bias"),
    [
        (5, 63, 33, False),
        (18, 64, 17, True),
        *slow((1, 1, 1, True), (33, 111, 70, False), (0, 16, 8, False), (513, 32, 40, True)),
    ],
)
def test_the_product(rows, width, outputs, bias, dtype):
    q, w = eight_bits(rows, width), eight_bits(outputs, width, seed=1)
    added = randn(outputs, dtype=dtype) if bias else None
    operands = q, scales(rows, 2), w, scales(outputs, 3), added
    got, expected = (
        quantized_product(*operands, dtype=dtype, impl=impl) for impl in ("triton", "reference")
    )
    assert got.dtype == dtype
    if bias and not INTERPRETED:
        torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    else:
        assert torch.equal(got, expected)


def test_sums_of_the_largest_numbers_are_exact():
    q = torch.full((1, 4099), -128, dtype=torch.int8, device=DEVICE)
    scale = torch.ones(1, device=DEVICE)
    got = quantized_product(q, scale, q, scale, dtype=torch.float32, impl="triton")
    assert got.item() == 4099 * 2**14


def test_rows_do_not_depend_on_their_number():
    x, weight = randn(20, 80), randn(24, 80, seed=1)
    w, scale_w = quantize_rows(weight, torch.int8, impl="triton")

    def product(rows):
        q, scale = quantize_rows(rows, torch.int8, impl="triton")
        return quantized_product(q, scale, w, scale_w, dtype=torch.float32, impl="triton")

    assert torch.equal(product(x)[17:19], product(x[17:19]))


def test_what_the_kernels_cannot_compute_is_refused():
    scale = torch.ones(1, device=DEVICE)
    wide = torch.zeros(1, 32769, device=DEVICE)
    with pytest.raises(ValueError, match="32769 elements; supported: 32768"):
        quantize_rows(wide, torch.int8, impl="triton")
    q = wide.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="is for int8, not for torch.float8_e4m3fn"):
        quantized_product(q, scale, q, scale, dtype=torch.float32, impl="triton")


def odd_rows():
    test_rows_in_int8(5, 63, torch.float32)


def odd_product():
    test_the_product(5, 63, 33, False, torch.float32)


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("(start + k < width)", "(start + k <= width)", odd_product),
        ("+ INTEGERS) - INTEGERS", ")", odd_rows),
        *slow(
            ("scale == 0.0", "scale < 0.0", odd_rows),
            ("448.0 if FP8 else 127.0", "448.0 if FP8 else 127.5", odd_rows),
            ("columns < WIDTH", "columns <= WIDTH", odd_rows),
            ("out_dtype=tl.int32)", "out_dtype=tl.int32) // 2", odd_product),
            ("scale_x + row", "scale_x + row * 0", odd_product),
        ),
    ],
)
def test_a_defect_is_visible(old, new, check, monkeypatch, tmp_path):
    module = importlib.import_module("gpuscore_kernels.quantized.triton")
    with planted(monkeypatch, module, old, new, tmp_path), pytest.raises(AssertionError):
        check()
