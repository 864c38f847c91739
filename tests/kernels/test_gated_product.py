"""Promise: on Hopper gate-up products write silu(gate) * up themselves, from weights as they are
and for any number of rows; where they do not, the reason is said.

Without a card, the kernel's order of reading weights is replayed. `make test-gpu` runs the kernel.
"""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from gpuscore import Scorer
from gpuscore.backends import plan_backend
from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.backends.common.shards import Shard
from gpuscore.backends.torch import backend, plan
from gpuscore.backends.torch.kernels import why_not_gated_product
from gpuscore.backends.torch.loader import WeightFormat, load_weights
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore_kernels import hopper
from support.models import reference_logprobs

CPU = torch.device("cpu")
LABELS = [3, 17, 399]


def replayed(x, weight):
    """Compute what the kernel does: column n reads row n // 2 of the gate or, odd, of up."""
    inner, width = len(weight) // 2, weight.shape[1]
    turns = weight.as_strided((inner, 2, width), (width, inner * width, 1)).flatten(0, 1)
    columns = x @ turns.T
    return functional.silu(columns[:, ::2]) * columns[:, 1::2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_of_all_ranks_as_they_are_loaded(tiny_model, ranks):
    directory, model = tiny_model("qwen3")
    architecture = read_architecture(RawConfig.read(directory))
    x = torch.randn(7, architecture.config.hidden_size, dtype=torch.float64)
    total = torch.zeros_like(x)
    for rank in range(ranks):
        group = SimpleNamespace(shard=Shard(rank, ranks), sum=None) if ranks > 1 else None
        form = WeightFormat(torch.float32, CPU)
        weights = load_weights(directory, architecture, form, group=group)
        mlp = weights.layers[1].mlp
        inner = replayed(x, mlp.gate_up_proj.weight.double())
        down = mlp.down_proj if group is None else mlp.down_proj.part
        total += inner @ down.weight.double().T
    expected = deepcopy(model.model.layers[1].mlp).double()(x)
    torch.testing.assert_close(total, expected.detach(), rtol=0, atol=1e-12)


@pytest.fixture
def inside(monkeypatch):
    """Let plans say that gate-up products write silu(gate) * up, and count the replay's calls."""
    calls = []

    def count(x, weight):
        calls.append(len(x))
        return replayed(x, weight)

    monkeypatch.setattr(plan, "why_not_gated_product", lambda *_: None)
    monkeypatch.setattr(backend, "gated_product", count)
    return calls


@pytest.mark.parametrize(("fewest", "seen"), [(1, [59, 59, 3]), (59, [59, 59]), (60, [])])
def test_scores_are_the_models_with_enough_rows(tiny_model, inside, monkeypatch, fewest, seen):
    directory, model = tiny_model("qwen3")
    assert backend.FEWEST_ROWS == 1000
    monkeypatch.setattr(backend, "FEWEST_ROWS", fewest)
    query, items = list(range(5, 40)), [[7], [9, 11, 399], [8] * 20]
    with Scorer(str(directory), device="cpu") as scorer:
        assert set(inside[:3]) == {370, 220}, "of the check at start's batches the larger ones"
        inside.clear()
        result = scorer.score(query, items, label_token_ids=LABELS, logprobs=True)
    assert inside == seen, "all rows but in the last layer, which has the scored ones only"
    expected = reference_logprobs(model, [query + item for item in items])[:, LABELS]
    assert abs(result.logprobs - expected).max() < 1e-4


def test_gate_and_up_in_the_wrong_order_are_refused(tiny_model, inside, monkeypatch):
    directory, _ = tiny_model("qwen3")

    def swapped(x, weight):
        return replayed(x, weight.roll(len(weight) // 2, 0))

    monkeypatch.setattr(backend, "gated_product", swapped)
    with pytest.raises(ConfigError, match="differs from the reference"):
        Scorer(str(directory), device="cpu").close()


@pytest.mark.parametrize(
    ("attention", "changes", "dtype", "reason"),
    [
        ("triton", {}, torch.bfloat16, "--attention is triton, not fa4"),
        ("fa4", {}, torch.float16, "SwiGLU in bfloat16"),
        ("fa4", {"activation": "gelu_tanh"}, torch.bfloat16, "SwiGLU in bfloat16"),
        ("fa4", {"mlp_bias": True}, torch.bfloat16, "without a bias"),
        ("fa4", {"intermediate_size": 84}, torch.bfloat16, "multiples of 8"),
        ("fa4", {}, torch.bfloat16, "there are no objects"),
    ],
)
def test_where_they_do_not_the_reason_is_said(
    tiny_model, monkeypatch, attention, changes, dtype, reason
):
    directory, _ = tiny_model("qwen3")
    monkeypatch.setattr(hopper, "why_not", lambda name, *sizes: "there are no objects")
    config = replace(read_architecture(RawConfig.read(directory)).config, **changes)
    assert reason in why_not_gated_product(config, attention, dtype)


def test_a_plan_says_it(tiny_model):
    directory, _ = tiny_model("qwen3")
    made = plan_backend(directory, ModelConfig(str(directory), device="cpu"))
    assert made.limits(1).gated_product == "no: --attention is torch, not fa4"
    assert replace(made, not_gated=None).limits(1).gated_product == "yes"


@pytest.fixture
def card():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper card")
    if (reason := hopper.why_not("product")) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    return torch.device("cuda")


def drawn(card, rows, width, inner):
    x = torch.randn(rows, width, dtype=torch.bfloat16, device=card)
    weight = torch.randn(2 * inner, width, dtype=torch.bfloat16, device=card) / width**0.5
    return x, weight


def check(got, x, weight):
    """Compare with float64: bfloat16 rounds by up to 2^-9."""
    expected = replayed(x.double(), weight.double())
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 7, 128, 129, 300, 12_000])
@pytest.mark.parametrize(("width", "inner"), [(1024, 3072), (72, 104), (896, 4864), (8, 8)])
def test_the_kernel_is_right(card, rows, width, inner):
    x, weight = drawn(card, rows, width, inner)
    got = hopper.gated_product(x, weight)
    assert got.shape == (rows, inner)
    sample = torch.randperm(rows, device=card)[:512]
    check(got[sample], x[sample], weight)


@pytest.mark.gpu
def test_graphs_and_streams(card):
    x, weight = drawn(card, 300, 1024, 3072)
    hopper.gated_product(x, weight)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = hopper.gated_product(x, weight)
    x.copy_(torch.randn_like(x))
    got.fill_(torch.nan)
    graph.replay()
    check(got, x, weight)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # what another stream read now would be the older numbers
        x.copy_(torch.randn_like(x))
        got = hopper.gated_product(x, weight)
    side.synchronize()
    check(got, x, weight)
