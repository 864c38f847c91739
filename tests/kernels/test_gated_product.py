"""Promise: on Hopper gate-up products write act(gate) * up themselves, from weights as they are and
for any number of rows; where they do not, the reason is said.

Without a card, the kernel's order of reading weights is replayed. `make test-gpu` runs the kernel.
"""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from gpuscore import Scorer
from gpuscore.backends import plan_backend
from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.hf_config import RawConfig
from gpuscore.backends.common.shards import Shard
from gpuscore.backends.torch import backend, plan
from gpuscore.backends.torch.kernels import why_not_gated_product
from gpuscore.backends.torch.loader import load_weights
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore_kernels import ahead
from gpuscore_kernels.gated import ACTIVATIONS, hopper
from support.models import reference_logprobs

CPU = torch.device("cpu")
LABELS = [3, 17, 399]
TORCH_NAMES = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def replayed(x, weight, activation):
    """Compute what the kernel does: column n reads row n // 2 of the gate or, odd, of up."""
    inner, width = len(weight) // 2, weight.shape[1]
    turns = weight.as_strided((inner, 2, width), (width, inner * width, 1)).flatten(0, 1)
    columns = x @ turns.T
    return TORCH_NAMES[activation](columns[:, ::2]) * columns[:, 1::2]


class Rank:
    """A rank's place in a group that adds nothing up."""

    def __init__(self, shard):
        self.shard = shard

    def sum(self, x):
        return x


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_weights_of_all_ranks_as_they_are_loaded(tiny_model, family, ranks):
    directory, model = tiny_model(family)
    architecture = read_architecture(RawConfig.read(directory))
    x = torch.randn(7, architecture.config.hidden_size, dtype=torch.float64)
    total = torch.zeros_like(x)
    for rank in range(ranks):
        group = Rank(Shard(rank, ranks)) if ranks > 1 else None
        weights = load_weights(directory, architecture, torch.float32, CPU, group=group)
        mlp = weights.layers[1].mlp
        inner = replayed(x, mlp.gate_up.weight.double(), architecture.config.activation)
        down = mlp.down if group is None else mlp.down.part
        total += inner @ down.weight.double().T
    expected = deepcopy(model.model.layers[1].mlp).double()(x)
    torch.testing.assert_close(total, expected.detach(), rtol=0, atol=1e-12)


@pytest.fixture
def inside(monkeypatch):
    """Let plans say that gate-up products write act(gate) * up, and count the replay's calls."""
    calls = []

    def count(x, weight, activation):
        calls.append(len(x))
        return replayed(x, weight, activation)

    monkeypatch.setattr(plan, "why_not_gated_product", lambda *_: None)
    monkeypatch.setattr(backend, "gated_product", count)
    return calls


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_scores_are_the_models(tiny_model, inside, family):
    directory, model = tiny_model(family)
    query, items = list(range(5, 40)), [[7], [9, 11, 399], [8] * 20]
    with Scorer(str(directory), device="cpu") as scorer:
        inside.clear()
        result = scorer.score(query, items, label_token_ids=LABELS, logprobs=True)
    assert inside == [59, 59, 3], "all rows but in the last layer, which has the scored ones only"
    expected = reference_logprobs(model, [query + item for item in items])[:, LABELS]
    assert abs(result.logprobs - expected).max() < 1e-4


def test_gate_and_up_in_the_wrong_order_are_refused(tiny_model, inside, monkeypatch):
    directory, _ = tiny_model("qwen3")

    def swapped(x, weight, activation):
        return replayed(x, weight.roll(len(weight) // 2, 0), activation)

    monkeypatch.setattr(backend, "gated_product", swapped)
    with pytest.raises(ConfigError, match="computes"):
        Scorer(str(directory), device="cpu").close()


@pytest.mark.parametrize(
    ("attention", "changes", "dtype", "precision", "reason"),
    [
        ("triton", {}, torch.bfloat16, "full", "--attention is triton, not fa4"),
        ("fa4", {}, torch.float16, "full", "plain MLPs in bfloat16"),
        ("fa4", {}, torch.bfloat16, "fp8", "plain MLPs in bfloat16"),
        ("fa4", {"mlp_bias": True}, torch.bfloat16, "full", "without a bias"),
        ("fa4", {"intermediate_size": 84}, torch.bfloat16, "full", "multiples of 8"),
        ("fa4", {}, torch.bfloat16, "full", "there are no objects"),
        ("fa4", {}, torch.bfloat16, "w8a16", "there are no objects"),
    ],
)
def test_where_they_do_not_the_reason_is_said(
    tiny_model, monkeypatch, attention, changes, dtype, precision, reason
):
    directory, _ = tiny_model("qwen3")
    monkeypatch.setattr(ahead, "why_not", lambda module, *sizes: "there are no objects")
    config = replace(read_architecture(RawConfig.read(directory)).config, **changes)
    assert reason in why_not_gated_product(config, attention, dtype, precision)


def test_a_plan_says_it(tiny_model):
    directory, _ = tiny_model("qwen3")
    made = plan_backend(directory, ModelConfig(str(directory), device="cpu"))
    assert made.limits(1).gated_product == "no: --attention is torch, not fa4"
    assert replace(made, not_gated=None).limits(1).gated_product == "yes"


@pytest.fixture
def card():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper card")
    if (reason := ahead.why_not(hopper.__name__, 0)) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    return torch.device("cuda")


def drawn(card, rows, width, inner):
    x = torch.randn(rows, width, dtype=torch.bfloat16, device=card)
    weight = torch.randn(2 * inner, width, dtype=torch.bfloat16, device=card) / width**0.5
    return x, weight


def check(got, x, weight, activation):
    """Compare with float64; a card's tanh is good to 5e-4, of values of about 3 times 3 here."""
    expected = replayed(x.double(), weight.double(), activation)
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 7, 128, 129, 300, 12_000])
@pytest.mark.parametrize(("width", "inner"), [(1024, 3072), (72, 104), (896, 4864), (8, 8)])
def test_the_kernel_is_right(card, rows, width, inner, activation):
    x, weight = drawn(card, rows, width, inner)
    got = hopper.gated_product(x, weight, activation)
    assert got.shape == (rows, inner)
    sample = torch.randperm(rows, device=card)[:512]
    check(got[sample], x[sample], weight, activation)


@pytest.mark.gpu
def test_no_rows(card):
    x, weight = drawn(card, 0, 1024, 3072)
    assert hopper.gated_product(x, weight, "silu").shape == (0, 3072)


@pytest.mark.gpu
def test_graphs_and_streams(card):
    x, weight = drawn(card, 300, 1024, 3072)
    hopper.gated_product(x, weight, "silu")  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = hopper.gated_product(x, weight, "silu")
    x.copy_(torch.randn_like(x))
    got.fill_(torch.nan)
    graph.replay()
    check(got, x, weight, "silu")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # what another stream read now would be the older numbers
        x.copy_(torch.randn_like(x))
        got = hopper.gated_product(x, weight, "silu")
    side.synchronize()
    check(got, x, weight, "silu")
