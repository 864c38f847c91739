"""Promise: what the interpreter of Triton's cannot show of quantised rows stands in their code."""

import importlib
import importlib.util

import pytest

from kernel_code.compiled import compiled_variant
from support.kernels import planted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="needs triton, which is for Linux"
    ),
]

NAN = "propagate_nan=tl.PropagateNan.ALL"


def ptx(name):
    module = importlib.import_module("gpuscore_kernels.quantized.triton")
    (variant,) = [variant for variant in module.variants() if variant.name == name]
    return compiled_variant(variant, 90).asm["ptx"]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_divisions_round_to_nearest_and_nan_reaches_the_scale(kind):
    code = ptx(f"rows width=1024 {kind}")
    assert "div.rn.f32" in code
    assert "div.full.f32" not in code
    assert "max.NaN.f32" in code


def test_float8_is_rounded_to_nearest_and_bounded():
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx("rows width=1024 fp8")


def test_a_scale_without_nan_is_visible(monkeypatch, tmp_path):
    module = importlib.import_module("gpuscore_kernels.quantized.triton")
    with planted(monkeypatch, module, NAN, "", tmp_path):
        assert "max.NaN.f32" not in ptx("rows width=1024 int8")
