"""Promise: the row-wise functions in C compute what their references do, whatever the sizes and
strides; a row's bits depend on that row alone; what does not fit is refused."""

import pytest
import torch

from gpuscore.backends.torch.compiler import cc
from gpuscore.backends.torch.layers import norm_and_rotate
from gpuscore.backends.torch.linear import scaled, unsigned
from gpuscore_kernels.quantized import EPS
from gpuscore_kernels.reference import QkvHeads, add_and_norm, gated, rms_norm
from gpuscore_kernels.row_functions.build import FILES, BuildError, build
from gpuscore_kernels.row_functions.functions import RowFunctions

# Half a step of the format, of numbers up to about 8; sums differ by their order.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
SIZES = pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 63), (63, 111), (5, 128)])


@pytest.fixture(scope="module")
def functions():
    return {dtype: RowFunctions(build(cc(), dtype), dtype) for dtype in TOLERANCE}


@pytest.fixture(autouse=True)
def generator():
    torch.manual_seed(0)


def rows_of(rows, columns, dtype):
    """Return random rows that do not follow each other in memory; between them is NaN."""
    memory = torch.full((rows, columns + 7), torch.nan, dtype=dtype)
    memory[:, 3 : 3 + columns] = torch.randn(rows, columns)
    return memory[:, 3 : 3 + columns]


def check(got, expected, dtype):
    for value, reference in zip(got, expected, strict=True):
        assert value.dtype == reference.dtype
        torch.testing.assert_close(value, reference, atol=TOLERANCE[dtype], rtol=0)


@DTYPES
@SIZES
@pytest.mark.parametrize("one_plus", [False, True])
def test_norms(functions, dtype, rows, columns, one_plus):
    x, delta = (rows_of(rows, columns, kind) for kind in (torch.float32, dtype))
    weight = torch.randn(columns).to(dtype)
    how = weight, 0.3, one_plus
    for residual in (x, rows_of(rows, columns, dtype)):
        check([functions[dtype].rms_norm(residual, *how)], [rms_norm(residual, *how)], dtype)
        expected = add_and_norm(residual, delta, *how)
        for stored in (residual, residual.contiguous().clone()):
            total, normed = functions[dtype].add_and_norm(stored, delta, *how)
            assert torch.equal(total, expected[0])
            check([normed], [expected[1]], dtype)


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(1, 2), (63, 10), (7, 128), (0, 16)])
@pytest.mark.parametrize("heads", [(3, 2), (4, 0), (0, 1)])
@pytest.mark.parametrize("normed", [True, False])
def test_heads(functions, dtype, rows, size, heads, normed):
    qkv = rows_of(rows, (heads[0] + 2 * heads[1]) * size, dtype)
    cos, sin = torch.randn(rows, size // 2), torch.randn(rows, size // 2)
    norm = torch.randn(size).to(dtype) if normed else None
    for one_plus in (False, True):
        arguments = (qkv, cos, sin, QkvHeads(*heads, norm, norm, 1e-6, one_plus))
        got, expected = functions[dtype].norm_and_rotate(*arguments), norm_and_rotate(*arguments)
        if not normed:
            assert all(map(torch.equal, got, expected)), "rounded once, as the reference"
        check(got, expected, dtype)
        assert got[0].transpose(0, 1).is_contiguous(), "queries lie head by head"


@DTYPES
@pytest.mark.parametrize("flaw", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_heads_that_are_not_finite(functions, dtype, flaw):
    """The key of a head becomes NaN and its value 0, and no other number changes."""
    size, heads = 22, (3, 2)
    for column in (3 * size + 5, 4 * size + 21, 5 * size, 6 * size + 21):  # keys, then values
        qkv = rows_of(7, 7 * size, dtype)
        qkv[4, column] = flaw
        tables = torch.rand(7, size // 2) + 0.5, torch.zeros(7, size // 2)
        results = [
            function(qkv.clone(), *tables, QkvHeads(*heads))
            for function in (functions[dtype].norm_and_rotate, norm_and_rotate)
        ]
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        (_, k, v), head = results[0], (column // size - 3) % 2
        assert k.isnan().all(-1).nonzero().tolist() == [[4, head]]
        assert (v == 0).all(-1).nonzero().tolist() == [[4, head]]
        assert v.isfinite().all()


def test_every_half(functions):
    """Numbers of 16 bits become float32, and float32 becomes the nearest of them, as in torch."""
    c, halves = functions[torch.float16], torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    halves = halves.view(torch.float16).unsqueeze(1)
    zeros, weight = torch.zeros(2**16, 1), torch.ones(1, dtype=torch.float16)
    wide = c.add_and_norm(zeros, halves, weight, 1e-6, one_plus=False)[0]
    torch.testing.assert_close(wide, halves.float(), rtol=0, atol=0, equal_nan=True)
    finite = halves.float()[halves.isfinite()]
    between = torch.cat([finite, finite * (1 + 2**-11), finite * (1 + 2**-12), finite * 1.0003])
    many = torch.cat([between, torch.tensor([65519.9, 65520.0, 1e6, 3e38, torch.inf, torch.nan])])
    got = c.scale_rows(many.unsqueeze(1), torch.ones(len(many)), None)[:, 0]
    torch.testing.assert_close(got, many.half(), rtol=0, atol=0, equal_nan=True)


@DTYPES
@SIZES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(functions, dtype, rows, columns, activation):
    gate_up = 3 * rows_of(rows, 2 * columns, dtype)
    check([functions[dtype].gated(gate_up, activation)], [gated(gate_up, activation)], dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_of_all_magnitudes(functions, activation):
    gate = torch.cat([torch.linspace(-120, 120, 9999), torch.tensor([0.0, -0.0, 3e38, -3e38])])
    gate_up = torch.stack([gate, torch.ones_like(gate)]).reshape(1, -1)
    got, expected = functions[torch.float32].gated(gate_up, activation), gated(gate_up, activation)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-7)


@DTYPES
@SIZES
def test_eight_bits(functions, dtype, rows, columns):
    x = rows_of(rows, columns, dtype)
    x[-1] = 0
    got, expected = functions[dtype].quantize_rows(x, EPS), unsigned(x)
    assert all(map(torch.equal, got, expected))
    y, scale = torch.randn(rows, columns), torch.rand(rows)
    for bias in (None, torch.randn(columns).to(dtype)):
        got = functions[dtype].scale_rows(y, scale, bias)
        assert torch.equal(got, scaled(y, scale, bias, dtype))


@DTYPES
def test_nan_stays(functions, dtype):
    x = torch.randn(3, 70).to(dtype)
    x[1, 69] = torch.nan
    c, weight = functions[dtype], torch.ones(70, dtype=dtype)
    tables = torch.ones(3, 5), torch.ones(3, 5)
    results = [
        c.rms_norm(x, weight, 1e-6, False),
        c.norm_and_rotate(x.clone(), *tables, QkvHeads(5, 1))[1].flatten(1),
        c.gated(x.flip(1).contiguous(), "silu"),
        c.quantize_rows(x, EPS)[1],
        c.scale_rows(x.float(), torch.ones(3), None),
    ]
    for result in results:
        assert result.reshape(3, -1).isnan().any(1).tolist() == [False, True, False]


@DTYPES
def test_bits_depend_on_the_row_alone(functions, dtype):
    """They depend neither on other rows, nor on the address, nor on the number of threads."""
    c, weight = functions[dtype], torch.randn(301).to(dtype)
    x = torch.randn(400, 301).to(dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        several = c.rms_norm(x, weight, 1e-6, False)
        torch.set_num_threads(1)
        assert torch.equal(c.rms_norm(x, weight, 1e-6, False), several)
    finally:
        torch.set_num_threads(threads)
    for shift in range(9):
        memory = torch.empty(301 + shift, dtype=dtype)
        memory[shift:] = x[7]
        alone = c.rms_norm(memory[shift:].unsqueeze(0), weight, 1e-6, False)
        assert torch.equal(alone[0], several[7])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 11])
@pytest.mark.parametrize(("columns", "width"), [(1, 1), (62, 63), (129, 111), (6, 128)])
def test_products(functions, rows, columns, width):
    x, weight = torch.randn(rows, width).bfloat16(), torch.randn(columns, width).bfloat16()
    c = functions[torch.bfloat16]
    got = c.products(x, weight)
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, atol=2e-5, rtol=0)
    for row in range(rows):
        alone = c.products(x[row : row + 1].contiguous(), weight)
        assert torch.equal(alone[0], got[row]), "bits do not depend on the other rows"


def test_what_does_not_fit_is_refused(functions):
    c, halves, x = functions[torch.float32], functions[torch.bfloat16], torch.randn(4, 6)
    tables = torch.ones(4, 1), torch.ones(4, 1)
    refused = [
        lambda: c.rms_norm(x.bfloat16(), torch.ones(6), 1e-6, False),
        lambda: c.rms_norm(x, torch.ones(5), 1e-6, False),
        lambda: c.rms_norm(x.T, torch.ones(4), 1e-6, False),
        lambda: c.rms_norm(x.to("meta"), torch.ones(6), 1e-6, False),
        lambda: c.add_and_norm(x, x[:3], torch.ones(6), 1e-6, one_plus=False),
        lambda: c.norm_and_rotate(x, *tables, QkvHeads(2, 1)),
        lambda: c.norm_and_rotate(x, tables[0][:3], tables[1], QkvHeads(1, 1)),
        lambda: c.norm_and_rotate(
            torch.ones(1, 2048), torch.ones(1, 1024), torch.ones(1, 1024), QkvHeads(1, 0)
        ),
        lambda: c.gated(x[:, :5], "silu"),
        lambda: halves.products(x, x.bfloat16()),
        lambda: halves.products(x.bfloat16(), torch.ones(3, 5, dtype=torch.bfloat16)),
        lambda: halves.products(x.bfloat16(), torch.ones(6, 3, dtype=torch.bfloat16).T),
        lambda: c.scale_rows(x.T, torch.ones(6), None),
        lambda: c.scale_rows(x, torch.ones(4), torch.ones(5)),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=r"must|supported"):
            call()


def test_builds_that_fail(tmp_path):
    for name in FILES:
        (tmp_path / name).write_text("")
    broken = tmp_path / "rows.c"
    broken.write_text("#error no such thing\n")
    with pytest.raises(BuildError, match=r"(?s)failed with exit code 1: .*no such thing"):
        build(cc(), torch.float32, tmp_path)
    with pytest.raises(BuildError, match="no-such-compiler could not run"):
        build("no-such-compiler", torch.float32)
    broken.write_text("void nothing(void); void f(void) { nothing(); }\n")
    with pytest.raises(BuildError, match="cannot be loaded: .*undefined symbol: nothing"):
        build(cc(), torch.float32, tmp_path)
