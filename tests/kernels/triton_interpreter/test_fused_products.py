"""Promise: a fused product computes what the product and the kernel behind it compute, with the
same rounding points."""

import importlib

import pytest
import torch

from gpuscore_kernels.fused_products import gated_product, heads_product
from gpuscore_kernels.gated import gated
from gpuscore_kernels.qk_norm_rope_store import Pages, qk_norm_rope_store
from support.kernels import DEVICE, DTYPES, assert_near, between_nans, planted, randn
from support.slow import slow

SLOTS = 40


def weights(rows, columns, dtype, seed=3):
    """Return contiguous weights [rows, columns] with NaN before and behind them."""
    around = torch.full((rows + 2, columns), torch.nan, dtype=dtype, device=DEVICE)
    around[1:-1] = randn(rows, columns, dtype=dtype, seed=seed) / columns**0.5
    return around[1:-1]


def rounded_product(x, weight, bias):
    """Return the product as a library returns it: one rounding, to x's dtype."""
    product = x.double() @ weight.double().T
    return (product if bias is None else product + bias.double()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "inner", "activation", "bias"),
    [
        (5, 63, 33, "silu", False),
        (18, 40, 17, "gelu_tanh", True),
        *slow((1, 1, 1, "silu", True), (33, 111, 70, "silu", False)),
        (0, 16, 8, "silu", False),
    ],
)
def test_gated_product(rows, width, inner, activation, bias, dtype):
    x = between_nans(2 * randn(rows, width, dtype=dtype))
    weight = weights(2 * inner, width, dtype)
    added = weights(2 * inner, 1, dtype, seed=4)[:, 0] if bias else None
    got = gated_product(x, weight, added, activation=activation, impl="triton")
    assert got.dtype == dtype
    assert got.is_contiguous()
    product = rounded_product(x, weight, added).double()
    assert_near(got, gated(product, activation, impl="reference"), dtype)


def test_the_product_is_rounded_before_the_activation():
    """With all rounding points nearly all bits are the reference's; without one, fewer are."""
    dtype = torch.float16
    x, weight = randn(16, 32, dtype=dtype), weights(64, 32, dtype)
    got = gated_product(x, weight, activation="silu", impl="triton")
    want = gated(rounded_product(x, weight, None), "silu", impl="reference")
    assert (got == want).float().mean() > 0.97


def tables(rows, head_dim):
    angles = 3 * randn(rows, head_dim // 2)
    return angles.cos(), angles.sin()


def poisoned_pages(kv_heads, head_dim, dtype, rows):
    k, v = (
        torch.full((kv_heads, SLOTS, head_dim), torch.nan, dtype=dtype, device=DEVICE)
        for _ in range(2)
    )
    return Pages(k, v, torch.tensor([31, -1, 0, 7, 39, *range(8, 30)][:rows], device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "heads", "kv_heads", "head_dim", "norm", "bias"),
    [
        (18, 40, 2, 1, 16, "llama", True),
        (5, 63, 3, 2, 24, "gemma", False),
        *slow((1, 17, 4, 2, 40, "none", False), (3, 33, 0, 2, 16, "llama", True)),
        *slow((2, 16, 2, 0, 96, "none", True), (0, 16, 2, 1, 16, "llama", False)),
    ],
)
def test_heads_product(rows, width, heads, kv_heads, head_dim, norm, bias, dtype):
    x = between_nans(2 * randn(rows, width, dtype=dtype))
    columns = (heads + 2 * kv_heads) * head_dim
    weight = weights(columns, width, dtype)
    added = weights(columns, 1, dtype, seed=4)[:, 0] if bias else None
    cos, sin = tables(rows, head_dim)
    norms = [1 + randn(head_dim, dtype=dtype, seed=s) for s in (1, 2)] if norm != "none" else []
    norms = norms or [None, None]
    pages, other = (poisoned_pages(kv_heads, head_dim, one, rows) for one in (dtype, torch.float64))
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "eps": 1e-4, "one_plus": norm == "gemma"}
    got = heads_product(
        x, weight, added, cos, sin, q_norm=norms[0], k_norm=norms[1], pages=pages, **sizes,
        impl="triton",
    )  # fmt: skip
    exact = [None if one is None else one.double() for one in norms]
    want = qk_norm_rope_store(
        *(one.double() for one in (rounded_product(x, weight, added), cos, sin)),
        q_norm=exact[0],
        k_norm=exact[1],
        pages=other,
        **sizes,
        impl="reference",
    )
    for one, exactly in zip(got, want, strict=True):
        assert one.dtype == dtype
        assert_near(one, exactly, dtype)
    for side, exactly in ((pages.k, other.k), (pages.v, other.v)):
        assert torch.equal(side.isnan(), exactly.isnan())
        if rows:
            assert_near(side.nan_to_num(), exactly.nan_to_num(), dtype)


def test_the_references_are_products_and_what_follows():
    x, weight = randn(3, 8), weights(12, 8, torch.float32)
    got = gated_product(x, weight, activation="silu", impl="reference")
    assert_near(got, gated(rounded_product(x, weight, None), "silu", impl="reference"), x.dtype)
    cos, sin = tables(3, 4)
    sizes = {"num_heads": 1, "num_kv_heads": 1}
    heads = heads_product(x, weight, None, cos, sin, **sizes, impl="reference")
    product = rounded_product(x, weight, None)
    want = qk_norm_rope_store(product, cos, sin, **sizes, impl="reference")
    for one, exactly in zip(heads, want, strict=True):
        assert_near(one, exactly, x.dtype)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_arguments_that_do_not_fit_are_refused(impl):
    x, weight = randn(3, 8), randn(6, 8)
    for wrong, message in (
        ((x, weight[:, :7]), "do not fit"),
        ((x, weight.T.contiguous().T), "not contiguous"),
        ((x, weight[:5]), r"must be \[2 I, E\]"),
        ((x, weight, randn(5)), "bias must be"),
    ):
        with pytest.raises(ValueError, match=message):
            gated_product(*wrong, activation="silu", impl=impl)
    with pytest.raises(ValueError, match="supported: silu, gelu_tanh"):
        gated_product(x, weight, activation="relu", impl=impl)
    with pytest.raises(ValueError, match="shapes do not fit"):
        heads_product(x, weight, None, *tables(3, 4), num_heads=1, num_kv_heads=1, impl=impl)


def odd_sizes():
    test_gated_product(5, 63, 33, "silu", False, torch.float32)


def all_heads():
    test_heads_product(18, 40, 2, 1, 16, "llama", True, torch.float32)


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        (
            "one.to(dtype), other.to(dtype)",
            "one, other",
            test_the_product_is_rounded_before_the_activation,
        ),
        ("(start + k < width)", "(start + k <= width)", odd_sizes),
        *slow(
            ("first + INNER * width", "first + BLOCK_N * width", odd_sizes),
            ("first + HALF * width", "first + width", all_heads),
            ("bias + HALF + column", "bias + column", all_heads),
            ("left, right, c, s, is_v)", "left, right, c, s, is_v & False)", all_heads),
            ("tl.where(is_q, q_norm, k_norm)", "q_norm", all_heads),
            ("(slot >= 0)", "(slot > 0)", all_heads),
        ),
    ],
)
def test_a_defect_is_visible(old, new, check, monkeypatch, tmp_path):
    module = importlib.import_module("gpuscore_kernels.fused_products.triton")
    launch = importlib.import_module("gpuscore_kernels.fused_products.launch")
    with planted(monkeypatch, module, old, new, tmp_path):
        importlib.reload(launch)
        with pytest.raises(AssertionError):
            check()
    importlib.reload(launch)
