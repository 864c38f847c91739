"""Promise: a mixture of experts is computed as it is defined and as transformers computes it, in
one call for all experts or one after the other; padding goes to no expert; with --deterministic a
row's bits do not depend on the others."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.hf_config import Mixture
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.backends.torch.layers import STEADY_ROWS, in_tiles
from gpuscore.backends.torch.mixture import (
    DenseExperts,
    MoE,
    MoEWeights,
    placed,
    why_not_grouped,
)
from gpuscore.backends.torch.operators import Operators
from support.model_configs import LLAMA_8B, MIXTURE
from support.slow import slow

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def to_experts(*chosen, experts):
    """Return logits that make row r choose the experts chosen[r], in this order."""
    logits = torch.full((len(chosen), experts), -4.0)
    for row, own in enumerate(chosen):
        logits[row, list(own)] = 1.0 - torch.arange(len(own)) / 8
    return logits


ROUTED = {
    "one row": (to_experts((2, 0), experts=4), 2),
    "all to one expert": (to_experts(*[(3,)] * 37, experts=5), 1),
    "experts without rows": (to_experts(*[(6, 1), (1, 6), (1, 2)] * 3, experts=7), 2),
    "every expert": (to_experts(*[(2, 0, 1)] * 5, experts=3), 3),
    "many rows": (randn(140, 9), 2),
    "one expert": (randn(3, 1), 1),
    "no rows": (randn(0, 4), 2),
}


def mixture(experts, top_k, inner, dtype=torch.float32, normed=True, width=24):
    """Return random weights with a router that tells nothing."""
    gate_up = randn(experts, 2 * inner, width, dtype=dtype, seed=1) / width**0.5
    down = randn(experts, width, inner, dtype=dtype, seed=2) / inner**0.5
    sizes = Mixture(experts, top_k, inner, normed, (True,))
    return MoEWeights(sizes, torch.zeros(experts, width), DenseExperts(gate_up, down, True))


def computed(weights, x, logits=None, filled=None, steady=False, activation="silu"):
    """Compute with the router's logits, or with these."""
    operators = Operators(by_rows=in_tiles(STEADY_ROWS)) if steady else Operators()
    if logits is not None:
        weights = MoEWeights(weights.mixture, weights.router, weights.experts, Fixed(logits))
    return MoE(activation, weights, operators)(x, filled)


class Fixed:
    """Stands for other ranks, of which the first has these logits, and which add nothing."""

    def __init__(self, logits):
        self.logits = logits

    def of_first(self, logits):
        assert logits.shape == self.logits.shape
        return self.logits

    def sum(self, rows):
        return rows


def by_hand(weights, x, logits, activation="silu"):
    """Compute row by row and expert by expert in float64."""
    sizes, experts, results = weights.mixture, weights.experts, []
    act = {"silu": functional.silu, "gelu_tanh": partial(functional.gelu, approximate="tanh")}
    for row, own in zip(x.double(), logits.double().softmax(1), strict=True):
        best = own.argsort(descending=True, stable=True)[: sizes.top_k]
        shares = own[best] / (own[best].sum() if sizes.norm_top_k else 1.0)
        total = torch.zeros_like(row)
        for share, expert in zip(shares, best, strict=True):
            gate, up = (experts.gate_up[expert].double() @ row).chunk(2)
            total += share * (experts.down[expert].double() @ (act[activation](gate) * up))
        results.append(total)
    return torch.stack(results) if results else x.double()


@pytest.mark.parametrize("steady", [False, True], ids=["in one call", "one by one"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", ROUTED)
def test_every_division_of_rows(case, dtype, steady):
    logits, top_k = ROUTED[case]
    weights = mixture(logits.shape[1], top_k, 40, dtype)
    x = randn(len(logits), 24, dtype=dtype, seed=3)
    got, expected = computed(weights, x, logits, steady=steady), by_hand(weights, x, logits)
    assert got.dtype == dtype
    assert got.shape == x.shape
    error = (got.double() - expected).norm() / expected.norm().clamp_min(1e-9)
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_shares_and_activations(normed, activation):
    logits = randn(29, 6)
    weights = mixture(logits.shape[1], 3, 20, normed=normed)
    x = randn(29, 24, seed=3)
    got = computed(weights, x, logits, activation=activation)
    expected = by_hand(weights, x, logits, activation)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5, 9, 99])
def test_padding_goes_to_no_expert(count, steady):
    logits, filled = randn(9, 5), torch.tensor([count], dtype=torch.int32)
    chosen = logits.topk(2).indices
    order, ends = placed(chosen, 5, filled)
    assert ends[-1] == 2 * min(count, 9)
    assert sorted(order.tolist()) == list(range(18))
    weights, x = mixture(logits.shape[1], 2, 16), randn(9, 24)
    alone = computed(weights, x[:count], logits[:count], steady=steady)
    x[count:], logits[count:] = torch.nan, torch.nan
    got = computed(weights, x, logits, filled, steady)
    torch.testing.assert_close(got[:count], alone, atol=1e-6, rtol=1e-5)


def test_a_row_of_nan_harms_no_other():
    logits, x = randn(9, 6), randn(9, 24)
    weights, others = mixture(logits.shape[1], 2, 16), [*range(4), *range(5, 9)]
    expected = computed(weights, x[others], logits[others])
    logits[4, 2:] = x[4] = torch.nan
    got = computed(weights, x, logits)
    assert got[4].isnan().all()
    torch.testing.assert_close(got[others], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", [18, 37, 70])
def test_a_steady_row_has_the_same_bits_in_any_company(rows):
    """Alone, with others, and with others that choose the same experts, or other ones."""
    logits, x = randn(rows, 4), randn(rows, 24)
    weights = mixture(logits.shape[1], 2, 16)
    every = computed(weights, x, logits, steady=True)
    for row in (0, rows // 2, rows - 1):
        alone = computed(weights, x[row : row + 1], logits[row : row + 1], steady=True)
        assert torch.equal(alone[0], every[row])
        for sign in (1, -1):
            company, same = randn(rows, 24, seed=9), sign * logits[row].repeat(rows, 1)
            company[row], same[row] = x[row], logits[row]
            assert torch.equal(computed(weights, company, same, steady=True)[row], every[row])


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("normalise", [True, *slow(False)])
def test_as_transformers_own_module(normalise, grouped):
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
    with torch.inference_mode():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed) / 5)
        x = randn(33, 40)
        expected = module(x.unsqueeze(0)).squeeze(0)
        own = DenseExperts(module.experts.gate_up_proj, module.experts.down_proj, grouped)
        sizes = Mixture(7, 3, 24, normalise, (True,))
        got = computed(MoEWeights(sizes, module.gate.weight, own), x)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_waits_for_the_host_are_known(monkeypatch):
    model, dense = (read_architecture(RawConfig(raw)).config for raw in (MIXTURE, LLAMA_8B))
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    bf16, half = torch.bfloat16, torch.float16
    kernels = "without waits in bfloat16 on sm_90 and sm_100 only"
    for capability, there in (((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        reason = why_not_grouped(model, cuda, bf16)
        assert reason is None if there else reason.endswith(kernels)
        assert why_not_grouped(model, cuda, half).endswith(kernels)
        assert why_not_grouped(dense, cuda, half) is None
    assert why_not_grouped(model, cpu, half) is None
    odd = read_architecture(RawConfig(MIXTURE | {"moe_intermediate_size": 12})).config
    assert why_not_grouped(odd, cpu, half).endswith("not multiples of 16 bytes")
    assert why_not_grouped(odd, cpu, torch.float32) is None
