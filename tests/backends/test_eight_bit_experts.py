"""Promise: experts of a mixture are computed in int8 as dense layers are, exactly, and a row's
result does not depend on how many others chose its experts. The router is never quantised."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from gpuscore.backends import plan_backend
from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.hf_config import Mixture
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.compiler import eagerly
from gpuscore.backends.torch.layers import EXPERT_ROWS
from gpuscore.backends.torch.linear import (
    DenseLinear,
    PackedLinear,
    QuantizedLinear,
    pack,
)
from gpuscore.backends.torch.loader import WeightFormat, load_weights
from gpuscore.backends.torch.mixture import MoE, MoEWeights
from gpuscore.backends.torch.operators import Operators
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore_kernels.quantized import quantize_rows
from gpuscore_kernels.reference import gated
from support.eight_bits import needs_int8
from support.quantized import FOLDER

pytestmark = needs_int8
WIDTH, INNER, EXPERTS = 24, 40, 5


def random_weight(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) / columns**0.5


def plain_mixture(router, top_k=2, left_out=(), dtype=torch.float32):
    """Return a mixture whose experts are in int8, but for those that are left out."""

    def linears(rows, columns, seed):
        weights = [random_weight(rows, columns, seed + x) for x in range(EXPERTS)]
        return tuple(
            DenseLinear(w.to(dtype), None)
            if x in left_out
            else QuantizedLinear(*quantize_rows(w), None)
            for x, w in enumerate(weights)
        )

    sizes = Mixture(EXPERTS, top_k, INNER, norm_top_k=True, layers=(True,))
    gate_up, down = linears(2 * INNER, WIDTH, 100), linears(WIDTH, INNER, 200)
    return MoEWeights(sizes, router.to(dtype), tuple(zip(gate_up, down, strict=True)))


def packed(weights):
    return replace(weights, experts=tuple(tuple(map(pack, both)) for both in weights.experts))


def computed(weights, x, compiler=eagerly):
    return MoE("silu", weights, Operators(compiler))(x)


def product(linear, x):
    """Compute one linear layer on one row, with sums of whole numbers."""
    if isinstance(linear, DenseLinear):
        return functional.linear(x, linear.weight)
    q, scale = quantize_rows(x[None])
    sums = (q.long() @ linear.weight.long().T).float()[0]
    return (sums * linear.scale * scale).to(x.dtype)


def by_hand(weights, x):
    """Compute row by row, and expert by expert."""
    results = []
    for row, logits in zip(x, functional.linear(x, weights.router).float(), strict=True):
        probable, experts = logits.softmax(0).topk(weights.mixture.top_k)
        total = torch.zeros(WIDTH)
        for share, expert in zip(probable / probable.sum(), experts, strict=True):
            gate_up, down = weights.experts[expert]
            gate, up = product(gate_up, row).chunk(2)
            total += share * product(down, functional.silu(gate) * up).float()
        results.append(total.to(x.dtype))
    return torch.stack(results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("left_out", [(), (1, 3)])
def test_experts_are_computed_as_documented(dtype, left_out):
    x = random_weight(77, WIDTH, 1).to(dtype) * 4
    plain = plain_mixture(random_weight(EXPERTS, WIDTH, 2), left_out=left_out, dtype=dtype)
    got, expected = computed(packed(plain), x), by_hand(plain, x)
    assert got.dtype == dtype
    # The last bit of an activation may decide how it is rounded, in some row.
    errors = (got.float() - expected.float()).abs().amax(dim=1)
    assert errors.sort().values[-3] <= (1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("left_out", [(), (0, 1)])
def test_a_row_does_not_depend_on_how_many_others_chose_its_expert(left_out):
    """One row has an expert to itself, then shares it with rows that leave the other expert."""
    sizes = set()

    # Threads may round the activation otherwise where their shares end, which a test of results
    # meets too rarely: so every call has the same number of rows.
    def seen(rows, activation):
        sizes.add(len(rows))
        return gated(rows, activation)

    def noting(function):
        return seen if function is gated else function

    router = torch.zeros(EXPERTS, WIDTH)
    router[0, 0], router[1, 0] = 9, -9  # the sign of a row's first number chooses its expert
    weights = packed(plain_mixture(router, top_k=1, left_out=left_out))
    strangers = torch.arange(102) % 4 == 3
    x = random_weight(102, WIDTH, 3) * 10
    x[:, 0] = x[:, 0].abs()
    x[5, 0] = -1.0
    together = computed(weights, x, noting)
    x[strangers, 0] = -1.0
    moved = computed(weights, x, noting)
    assert torch.equal(moved[~strangers], together[~strangers])
    assert not torch.equal(moved[strangers], together[strangers])
    assert sizes == {EXPERT_ROWS}


def test_no_rows():
    weights = packed(plain_mixture(random_weight(EXPERTS, WIDTH, 2)))
    assert computed(weights, torch.empty(0, WIDTH)).shape == (0, WIDTH)


def test_the_router_is_not_quantised():
    directory = FOLDER / "qwen3-moe-int8"
    architecture = read_architecture(RawConfig.read(directory))
    form = WeightFormat(torch.float32, torch.device("cpu"), "int8")
    weights = load_weights(directory, architecture, form)
    mixtures = [x.mlp for x in weights.layers if isinstance(x.mlp, MoEWeights)]
    assert len(mixtures) == sum(architecture.config.mixture.layers)
    for layer in (x for mlp in mixtures for both in mlp.experts for x in both):
        assert isinstance(layer, PackedLinear)
    stored = load_file(directory / "model.safetensors")["model.layers.0.mlp.gate.weight"]
    assert torch.equal(mixtures[0].router, stored.float())


def test_a_quantised_router_is_refused(tmp_path):
    directory = shutil.copytree(FOLDER / "qwen3-moe-int8", tmp_path / "model")
    tensors, name = load_file(directory / "model.safetensors"), "model.layers.0.mlp.gate.weight"
    q, scale = quantize_rows(tensors[name].float())
    tensors |= {name: q, f"{name}_scale": scale[:, None]}
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="mlp.gate.weight is I8; supported: bfloat16"):
        TorchBackend(plan_backend(directory, ModelConfig(device="cpu")))
