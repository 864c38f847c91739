"""Promise: the kernels that work row by row equal their references in float64."""

import pytest
import torch

from gpuscore_kernels import reference
from gpuscore_kernels.add_rms_norm.triton import add_rms_norm
from gpuscore_kernels.gated.triton import gated
from support.kernels import DEVICE, DTYPES, assert_near, between_nans, randn


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 63), (3, 128), (0, 16)])
def test_add_rms_norm(rows, width, one_plus, dtype):
    stream, delta = (
        between_nans(randn(rows, width, dtype=d, seed=s))
        for s, d in ((1, torch.float32), (2, dtype))
    )
    weight = 1 + randn(width, dtype=dtype)
    options = {"eps": 1e-3, "one_plus": one_plus}
    narrow = between_nans(stream.to(dtype))
    for x, added in ((stream, delta), (narrow, delta), (stream, None), (narrow, None)):
        total, normed = add_rms_norm(x, added, weight, **options)
        exact = x if added is None else x.float() + added.float()
        assert total.dtype == exact.dtype
        assert torch.equal(total, exact)
        expected = reference.rms_norm(exact.double(), weight.double(), **options)
        assert normed.dtype == dtype
        assert_near(normed, expected, dtype)


def test_the_norm_rounds_once():
    """Rounding once, after the weight, gives nearly always the same bits."""
    x, weight = randn(7, 96, dtype=torch.float16), 1 + randn(96, dtype=torch.float16)
    for one_plus in (False, True):
        options = {"eps": 1e-6, "one_plus": one_plus}
        got = add_rms_norm(x, None, weight, **options)[1]
        expected = reference.rms_norm(x, weight, **options)
        assert (got == expected).float().mean() > 0.99


def test_rows_do_not_depend_on_their_number():
    x, weight = randn(9, 80), randn(80)
    every = add_rms_norm(x, x, weight, eps=1e-6)
    some = add_rms_norm(x[4:6], x[4:6], weight, eps=1e-6)
    assert all(torch.equal(a[4:6], b) for a, b in zip(every, some, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 63), (2, 1111), (0, 16)])
def test_gated(rows, width, activation, dtype):
    gate_up = between_nans(4 * randn(rows, 2 * width, dtype=dtype))
    got = gated(gate_up, activation)
    assert got.dtype == dtype
    assert_near(got, reference.gated(gate_up.double(), activation), dtype)


def test_the_activation_is_not_rounded():
    gate_up = 4 * randn(7, 192, dtype=torch.float16)
    for activation in ("silu", "gelu_tanh"):
        got = gated(gate_up, activation)
        expected = reference.gated(gate_up.double(), activation).half()
        assert (got == expected).float().mean() > 0.99


def test_gated_far_from_zero():
    gate = torch.tensor([-1e4, -90, -20, 0, 20, 90, 1e4])
    gate_up = torch.cat((gate, torch.full_like(gate, 2.0))).unsqueeze(0).to(DEVICE)
    for activation in ("silu", "gelu_tanh"):
        got = gated(gate_up, activation).double()
        expected = reference.gated(gate_up.double(), activation)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
