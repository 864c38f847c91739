"""Promise: the kernels of mixtures of experts choose, place and compute rows as their references
and as transformers, a row's bits do not depend on the others, and padding costs nothing."""

import importlib

import numpy as np
import pytest
import torch

from gpuscore_kernels.expert_mlp import expert_mlp
from gpuscore_kernels.expert_mlp.triton import most_tiles
from gpuscore_kernels.routing import route
from support.kernels import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    TOLERANCE,
    assert_near,
    between_nans,
    planted,
    randn,
)
from support.slow import slow

BEHIND = 4096  # elements after every tensor that a kernel may not write


class Behind:
    """The memory behind new tensors."""

    def __init__(self, empty):
        self.empty, self.kept = empty, []

    def make(self, *sizes, **options):
        size = sizes if isinstance(sizes[0], int) else sizes[0]
        whole = self.empty(int(np.prod(size)) + BEHIND, **options)
        self.kept.append((whole[-BEHIND:], whole[-BEHIND:].clone()))
        return whole[:-BEHIND].view(size)

    def check(self):
        kept, self.kept = self.kept, []
        for now, before in kept:
            assert torch.equal(now.nan_to_num(7.0), before.nan_to_num(7.0)), "a write behind"


@pytest.fixture(autouse=True)
def behind(monkeypatch):
    """Let every new tensor be followed by memory that nobody may write; check it at the end."""
    guard = Behind(torch.empty)
    monkeypatch.setattr(torch, "empty", guard.make)
    yield guard
    guard.check()


def filled_with(count):
    return None if count is None else torch.tensor([count], dtype=torch.int32, device=DEVICE)


def assert_routed(logits, top_k, normalise=True, count=None):
    """Compare with the reference in float64, and return the kernels' routing."""
    options = {"top_k": top_k, "norm_top_k": normalise, "filled": filled_with(count)}
    got = route(logits, **options, impl="triton")
    expected = route(logits.double(), **options, impl="reference")
    end = int(expected.starts[-1])
    assert torch.equal(got.starts, expected.starts)
    assert torch.equal(got.places, expected.places)
    assert torch.equal(got.rows[:end], expected.rows[:end])
    assert got.weights.dtype == torch.float32
    torch.testing.assert_close(got.weights.double(), expected.weights, atol=1e-6, rtol=1e-5)
    return got


def to_experts(*chosen, experts):
    """Return logits that make row r choose the experts chosen[r], in this order."""
    logits = torch.full((len(chosen), experts), -4.0)
    for row, own in enumerate(chosen):
        logits[row, list(own)] = 1.0 - torch.arange(len(own)) / 8
    return logits.to(DEVICE)


ROUTED = {
    "one row": (to_experts((2, 0), experts=4), 2),
    "all to one expert": (to_experts(*[(3,)] * 21, experts=5), 1),
    "experts without rows": (to_experts(*[(6, 1), (1, 6), (1, 2)] * 3, experts=7), 2),
    "every expert": (to_experts(*[(2, 0, 1)] * 5, experts=3), 3),
    "many blocks": (randn(140, 9), 2),
    "one expert": (randn(3, 1), 1),
}


@pytest.mark.parametrize(
    "case",
    ["experts without rows", *slow(*(case for case in ROUTED if case != "experts without rows"))],
)
def test_routing(case):
    assert_routed(*ROUTED[case])


@pytest.mark.slow
def test_weights_that_are_not_normalised():
    routing = assert_routed(randn(6, 5), 2, normalise=False)
    assert (routing.weights.sum(dim=1) < 0.99).any()


@pytest.mark.parametrize("count", slow(0, 1, 6, 13, 99))
def test_padding_has_no_place(count):
    routing = assert_routed(randn(13, 5), 2, count=count)
    assert int(routing.starts[-1]) == 2 * min(count, 13)


def test_no_rows():
    assert_routed(randn(0, 5), 2)


def test_of_equal_experts_the_first_are_chosen():
    """Checks the choice that torch.topk makes on CUDA."""
    logits = torch.tensor([[1.0, 3, 2, 2, 2, 0], [0, 0, 0, 0, 0, 0]], device=DEVICE)
    routing = route(logits, top_k=3, norm_top_k=True, impl="triton")
    expected = to_experts((1, 2, 3), (0, 1, 2), experts=6)
    assert torch.equal(
        routing.places, route(expected, top_k=3, norm_top_k=True, impl="triton").places
    )
    if not INTERPRETED:
        by_torch = route(logits, top_k=3, norm_top_k=True, impl="reference")
        assert torch.equal(routing.starts, by_torch.starts)


@pytest.mark.parametrize("value", [torch.nan, *slow(torch.inf)])
def test_a_row_of_nan_goes_to_some_experts_and_harms_no_other(value):
    logits = randn(9, 6)
    logits[4, 2:] = value
    routing = route(logits, top_k=2, norm_top_k=False, impl="triton")
    assert routing.weights[4].isnan().all()
    assert sorted(routing.places.flatten().tolist()) == list(range(18))
    assert int(routing.starts[-1]) == 18
    others = [row for row in range(9) if row != 4]
    expected = route(logits[others], top_k=2, norm_top_k=False, impl="triton")
    assert torch.equal(routing.weights[others], expected.weights)


def weights(experts, width, inner, dtype=torch.float32):
    gate_up = randn(experts, 2 * inner, width, dtype=dtype, seed=1) / width**0.5
    return gate_up, randn(experts, width, inner, dtype=dtype, seed=2) / inner**0.5


def computed(x, logits, top_k, gate_up, down, count=None, activation="silu", impl="triton"):
    filled = filled_with(count)
    routing = route(logits, top_k=top_k, norm_top_k=True, filled=filled, impl=impl)
    return expert_mlp(x, routing, gate_up, down, activation, impl=impl)


def assert_computed(logits, top_k, width, inner, dtype=torch.float32, activation="silu"):
    """Compare with the reference in float64."""
    x = between_nans(randn(len(logits), width, dtype=dtype))
    own = weights(logits.shape[1], width, inner, dtype)
    got = computed(x, logits, top_k, *own, activation=activation)
    wide = (x.double(), logits.double(), top_k, *(weight.double() for weight in own))
    expected = computed(*wide, activation=activation, impl="reference")
    assert got.dtype == dtype
    assert_near(
        got, expected, dtype, most=2 * TOLERANCE[dtype]
    )  # four roundings, one after the other


CASES = [
    ("experts without rows", 24, 40),
    ("one row", 24, 16),
    ("all to one expert", 63, 17),
    ("every expert", 111, 63),
    ("many blocks", 17, 9),
    ("one expert", 1, 1),
]


@pytest.mark.parametrize(
    ("case", "width", "inner", "dtype"),
    [
        (*CASES[0], torch.float32),
        *slow(*((*case, dtype) for case in CASES for dtype in DTYPES)),
    ],
)
def test_experts(case, width, inner, dtype):
    logits, top_k = ROUTED[case]
    assert_computed(logits, top_k, width, inner, dtype)


@pytest.mark.slow
def test_the_other_activation():
    assert_computed(randn(5, 4), 2, 24, 20, activation="gelu_tanh")


@pytest.mark.slow
def test_experts_at_random():
    rng = np.random.default_rng(0)
    for seed in range(6):
        rows, experts, width, inner = (int(rng.integers(1, n)) for n in (30, 9, 50, 40))
        top_k = int(rng.integers(1, experts + 1))
        assert_computed(randn(rows, experts, seed=seed), top_k, width, inner)


@pytest.mark.slow
def test_halves_round_where_torch_does():
    """Both round the products, the activation and the sum, so nearly all bits are the same."""
    x, logits = randn(40, 48, dtype=torch.float16), randn(40, 5)
    own = weights(5, 48, 32, torch.float16)
    got, expected = (computed(x, logits, 2, *own, impl=impl) for impl in ("triton", "reference"))
    assert (got == expected).float().mean() > 0.97


# More rows than a tile has: 16 in the interpreter, 128 on a card.
@pytest.mark.parametrize("rows", [18, *slow(37), *([] if INTERPRETED else [700])])
def test_a_row_has_the_same_bits_in_any_company(rows):
    """Alone, with others, and with others that choose the same experts, or other ones."""
    experts, top_k = 4, 2
    x, own = randn(rows, 24), weights(experts, 24, 16)
    logits = randn(rows, experts)
    every = computed(x, logits, top_k, *own)
    for row in (0, 20, 36) if rows > 18 else (17,):
        alone = computed(x[row : row + 1], logits[row : row + 1], top_k, *own)
        assert torch.equal(alone[0], every[row])
        for sign in (1, -1) if rows > 18 else (1,):
            company, same = randn(rows, 24, seed=9), sign * logits[row].repeat(rows, 1)
            company[row], same[row] = x[row], logits[row]
            assert torch.equal(computed(company, same, top_k, *own)[row], every[row])


@pytest.mark.parametrize("count", [5, *slow(0, 1)])
def test_padding_costs_no_tile_and_is_zero(count):
    x, logits, own = randn(9, 24), randn(9, 5), weights(5, 24, 16)
    every = computed(x[:count], logits[:count], 2, *own)
    x[count:], logits[count:] = torch.nan, torch.nan
    got = computed(x, logits, 2, *own, count=count)
    assert torch.equal(got[:count], every)
    assert not got[count:].any()


def test_no_row_has_no_experts():
    assert computed(randn(0, 24), randn(0, 5), 2, *weights(5, 24, 16)).shape == (0, 24)


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_there_are_as_many_tiles_as_the_worst_division_needs(rows):
    rng = np.random.default_rng(rows)
    for places in (1, 2, 5, 16, 33, 100):
        for experts in (1, 2, 7, 40):
            most = most_tiles(places, experts, rows)
            divisions = rng.multinomial(places, rng.dirichlet(np.full(experts, 0.4)), 300)
            tiles = (-(-divisions // rows)).sum(axis=1)
            assert tiles.max() <= most
            full = min(experts, places)  # one row each, and the rest to the first
            worst = np.array([1 + places - full, *[1] * (full - 1)])
            assert (-(-worst // rows)).sum() == most


@pytest.mark.slow
@pytest.mark.parametrize("normalise", [True, False])
def test_as_transformers_own_module(normalise):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=40,
        moe_intermediate_size=24,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=normalise,
    )
    module = Qwen3MoeSparseMoeBlock(config)
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed).cpu() / 5)
        x = randn(33, 40)
        expected = module(x.cpu().unsqueeze(0)).squeeze(0)
    module = module.to(DEVICE)
    logits = x @ module.gate.weight.data.T
    for impl in ("triton", "reference"):
        routing = route(logits, top_k=3, norm_top_k=normalise, impl=impl)
        own = (module.experts.gate_up_proj.data, module.experts.down_proj.data)
        assert_near(expert_mlp(x, routing, *own, "silu", impl=impl).cpu(), expected, torch.float32)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_what_does_not_fit_is_refused(impl):
    logits, x, own = randn(3, 5), randn(3, 24), weights(5, 24, 16)
    with pytest.raises(ValueError, match="6 experts of each row of \\(3, 5\\)"):
        route(logits, top_k=6, norm_top_k=True, impl=impl)
    with pytest.raises(ValueError, match="filled must be \\[1\\]"):
        route(logits, top_k=2, norm_top_k=True, filled=logits, impl=impl)
    routing = route(logits, top_k=2, norm_top_k=True, impl=impl)
    with pytest.raises(ValueError, match="a routing of 3 rows to 5 experts"):
        expert_mlp(x[:2], routing, *own, "silu", impl=impl)
    with pytest.raises(ValueError, match="do not fit"):
        expert_mlp(x, routing, own[0], own[1][:, :, :-1], "silu", impl=impl)
    with pytest.raises(ValueError, match="supported: silu, gelu_tanh"):
        expert_mlp(x, routing, *own, "relu", impl=impl)


def many_rows():
    assert_routed(*ROUTED["many blocks"])


def rows_with_padding():
    test_padding_has_no_place(6)


def one_expert_has_all():
    assert_computed(*ROUTED["all to one expert"], 63, 17)


def some_experts_have_none():
    assert_computed(*ROUTED["experts without rows"], 24, 40)


DEFECTS = [
    # the choice
    ("routing", "tie_break_left=True", "tie_break_left=False")
    + (test_of_equal_experts_the_first_are_chosen,),
    ("routing", "tl.where(hit, p, 0.0)", "tl.where(hit, left, 0.0)")
    + (lambda: test_a_row_of_nan_goes_to_some_experts_and_harms_no_other(torch.nan),),
    ("routing", "weight / tl.sum(weight, axis=1)[:, None]", "weight", many_rows),
    # a wrong place
    ("routing", "(block < own)", "(block < own - 1)", many_rows),
    ("routing", "tl.cumsum(marks, axis=0) - marks", "tl.cumsum(marks, axis=0)", many_rows),
    ("routing", "(ends - total + before)", "(ends - total)", many_rows),
    # padding that counts
    ("routing", "tl.minimum(count, tl.load(filled))", "count", rows_with_padding),
    ("routing", "tl.where(mine >= 0, at, -1)", "at", rows_with_padding),
    ("routing", "& is_expert & is_row[:, None]", "& is_expert", rows_with_padding),
    # a wrong offset of an expert, of its tile, of its rows
    ("expert_mlp", "expert.to(tl.int64) * (2 * INNER)", "expert.to(tl.int64) * INNER")
    + (some_experts_have_none,),
    ("expert_mlp", "tl.load(starts + own, mask", "tl.load(starts, mask", some_experts_have_none),
    ("expert_mlp", "(tile - before) * BLOCK_M", "tile * BLOCK_M", some_experts_have_none),
    ("expert_mlp", "column % 2 * INNER", "column // (BLOCK_N // 2) * INNER", one_expert_has_all),
    ("expert_mlp", "x + row.to(tl.int64) * x_stride", "x + row.to(tl.int64) * width")
    + (one_expert_has_all,),
    # a mask that is missing
    ("expert_mlp", "inside = is_row[:, None] & (column < COLUMNS)[None, :]")
    + ("inside = (place >= 0)[:, None] & (column < COLUMNS)[None, :]", some_experts_have_none),
    ("expert_mlp", "inside = is_row[:, None] & (inner < INNER)[None, :]")
    + ("inside = is_row[:, None] & (inner >= 0)[None, :]", one_expert_has_all),
    ("expert_mlp", "a_mask & (start + k < width)", "a_mask", one_expert_has_all),
    # the number of rows in the result
    ("expert_mlp", "total = tl.dot(a, tl.trans(b), total, input_precision=\"ieee\")")
    + ("total = tl.dot(a, tl.trans(b), total) + 1e-6 * tl.sum(is_row.to(tl.int32))",)
    + (lambda: test_a_row_has_the_same_bits_in_any_company(18),),
    ("expert_mlp", "weights + row * TOP_K + slot", "weights + row * TOP_K", some_experts_have_none)
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "old", "new", "check"), DEFECTS[:1] + slow(*DEFECTS[1:]))
def test_a_defect_is_visible(kernel, old, new, check, monkeypatch, tmp_path, behind):
    module = importlib.import_module(f"gpuscore_kernels.{kernel}.triton")

    def check_all():
        check()
        behind.check()

    with planted(monkeypatch, module, old, new, tmp_path), pytest.raises(AssertionError):
        check_all()
    behind.kept.clear()
