"""Products of float8_e4m3fn by torch's scaled_mm, on a CPU; shapes on fake CUDA tensors."""

import re

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import ScalingType, scaled_mm

from gpuscore_kernels.quantized import fp8, quantize_rows, quantized_product

F8 = torch.float8_e4m3fn


def rows(count: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return quantize_rows(torch.randn(count, width, generator=generator), F8, impl="reference")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("count", "width", "outputs"), [(5, 64, 48), (0, 32, 16), (33, 1024, 256)])
def test_it_computes_what_the_reference_does(
    count: int, width: int, outputs: int, dtype: torch.dtype
) -> None:
    (q, scale_x), (w, scale_w) = rows(count, width, 1), rows(outputs, width, 2)
    bias = None if dtype == torch.float32 else torch.linspace(-9, 9, outputs).to(dtype)
    operands = q, scale_x, w, scale_w, bias
    got = fp8.Fp8Product(w, scale_w, bias)(q, scale_x, dtype)
    expected = quantized_product(*operands, dtype=dtype, impl="reference")
    assert got.dtype == dtype
    eps = max(torch.finfo(dtype).eps, 2e-6)
    torch.testing.assert_close(got, expected, rtol=eps, atol=1e-4)
    by_torch = scaled_mm(
        q,
        w.T,
        scale_x.unsqueeze(1),
        ScalingType.RowWise,
        scale_w.unsqueeze(0),
        ScalingType.RowWise,
        bias=bias,
        output_dtype=dtype,
    )
    assert torch.equal(got, by_torch)


@pytest.mark.parametrize(
    ("capability", "shape", "dtype", "reason"),
    [
        ((8, 9), (4096, 1024), torch.bfloat16, None),
        ((9, 0), (4096, 1024), torch.float16, None),
        ((8, 0), (4096, 1024), torch.bfloat16, "no FP8 .* on sm_80"),
        ((12, 0), (4096, 1024), torch.bfloat16, "no FP8 .* on sm_120"),
        ((9, 0), (4090, 1024), torch.bfloat16, r"\[4090, 1024\] are not multiples of 16"),
        ((9, 0), (4096, 1032), torch.bfloat16, r"\[4096, 1032\] are not"),
        ((9, 0), (4096, 1024), torch.float32, "float32"),
    ],
)
def test_cards_and_sizes_that_it_is_not_for_are_refused(
    capability: fp8.Capability,
    shape: tuple[int, int],
    dtype: torch.dtype,
    reason: str | None,
) -> None:
    """All other calls have the shapes and strides that torch demands of CUDA tensors."""
    (outputs, width), count = shape, 5
    refusal = fp8.refusal(capability, outputs, width, dtype)
    if reason is not None:
        assert refusal is not None
        assert re.search(reason, refusal)
        return
    assert refusal is None
    with FakeTensorMode():
        q, w = (torch.empty(n, width, dtype=F8, device="cuda") for n in (count, outputs))
        scale_x, bias = torch.empty(count, device="cuda"), torch.empty(outputs, device="cuda")
        scale_w = torch.empty(outputs, device="cuda")
        out = fp8.Fp8Product(w, scale_w, bias.to(dtype))(q, scale_x, dtype)
        assert (out.shape, out.dtype) == ((count, outputs), dtype)


def test_it_is_for_float8_with_a_scale_per_output() -> None:
    w, scale = rows(3, 32, 1)
    with pytest.raises(ValueError, match=r"one scale per output in float32, not \(1, 1\)"):
        fp8.Fp8Product(w, torch.ones(1, 1), None)
    for wrong in (w.view(torch.int8), w.T, w[0]):
        with pytest.raises(ValueError, match="contiguous rows of float8_e4m3fn, not"):
            fp8.Fp8Product(wrong, scale, None)
