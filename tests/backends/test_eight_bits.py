"""Promise: the linear layers of a checkpoint in INT8 are computed in INT8, exactly: rows are
rounded as documented, and nothing else is."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from gpuscore import Scorer
from gpuscore.backends import plan_backend
from gpuscore.backends.common.shapes import count_weight_bytes
from gpuscore.backends.torch.linear import (
    DenseLinear,
    LinearParts,
    PackedLinear,
    Products,
    QuantizedLinear,
    pack,
    stack,
)
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore_kernels.quantized import quantize_rows
from support.eight_bits import needs_int8
from support.models import random_ids
from support.quantized import quantised
from support.slow import slow

pytestmark = needs_int8
FLOAT32 = {"device": "cpu", "dtype": "float32"}


def in_steps(x):
    """Return x [..., K] rounded to 127 steps of each row's largest magnitude."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale == 0, 0, (x / scale).round() * scale)


class Rounded(nn.Module):
    """A linear layer of transformers, with rows and weights rounded to int8's steps."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = in_steps(linear.weight.detach()), linear.bias

    def forward(self, x):
        return functional.linear(in_steps(x), self.weight, self.bias)


def rounded(model):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and name not in ("lm_head", "score"):
                setattr(module, name, Rounded(child))
    return model


@pytest.mark.parametrize(
    "family", ["qwen3", "llama", *slow("qwen2", "mistral", "gemma2", "gemma3")]
)
def test_a_checkpoint_is_computed_as_it_says(tiny_model, tmp_path, family):
    directory, model = tiny_model(family)
    oracle, rng = rounded(copy.deepcopy(model)), np.random.default_rng(0)
    prompts = [random_ids(rng, count) for count in (5, 19, 9, 30, 2)]
    errors = []
    with Scorer(str(quantised(directory, tmp_path / "made")), **FLOAT32) as scorer:
        for *query, last in prompts:
            ids = {"label_token_ids": [3, 9, 21], "logprobs": True}
            got = scorer.score(query, [[last]], **ids).logprobs[0]
            with torch.no_grad():
                logits = oracle(torch.tensor([[*query, last]])).logits[0, -1]
            expected = logits.log_softmax(-1)[[3, 9, 21]].numpy()
            errors.append(np.abs(got - expected).max())
    # The last bit of an activation may decide how it is rounded: 0.05 in log p, in some prompt.
    assert np.median(errors) <= 1e-4


@pytest.mark.parametrize(("rows", "width", "outputs"), [(1, 1, 1), (7, 65, 3), (33, 300, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_exact(rows, width, outputs, dtype):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    w, scale = quantize_rows(torch.randn(outputs, width, generator=generator))
    plain = QuantizedLinear(w, scale, bias)
    got = Products()(pack(plain), x)
    q, of_rows = quantize_rows(x)
    sums = (q.long() @ w.long().T).float()  # rounded once, as oneDNN does
    expected = (sums * scale * of_rows[:, None] + bias.float()).to(dtype)
    assert torch.equal(got, expected)
    assert torch.equal(Products()(plain, x), expected)
    assert Products()(pack(plain), x[:0]).shape == (0, outputs)


def test_the_largest_sums_are_exact():
    width = 3072
    w = torch.full((2, width), 127, dtype=torch.int8)
    w[1] = -127
    x = torch.full((2, width), 1.0)
    x[1] = -1.0
    got = Products()(pack(QuantizedLinear(w, torch.ones(2), None)), x)
    largest = 127 * 127 * width / 127
    expected = torch.tensor([[largest, -largest], [-largest, largest]])
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_a_row_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 128, generator=generator)
    w, scale = quantize_rows(torch.randn(96, 128, generator=generator))
    layer, products = pack(QuantizedLinear(w, scale, None)), Products()
    every = products(layer, x)
    x[1:] *= 1e6  # strangers with a much larger scale
    assert torch.equal(products(layer, x)[0], every[0])
    assert torch.equal(products(layer, x[:1])[0], every[0])


def test_layers_of_several_formats_are_stacked():
    def layer(seed, quantized):
        weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        if quantized:
            return QuantizedLinear(*quantize_rows(weight), None)
        return DenseLinear(weight, None)

    x, products = torch.randn(5, 16), Products()
    for kinds, whole in (((1, 1), QuantizedLinear), ((0, 0), DenseLinear), ((1, 0), LinearParts)):
        parts = [layer(seed, kind) for seed, kind in enumerate(kinds)]
        both = stack(parts)
        assert isinstance(both, whole)
        expected = torch.cat([products(part, x) for part in parts], dim=1)
        torch.testing.assert_close(products(both, x), expected)
    packed = pack(LinearParts(tuple(parts)))
    assert isinstance(packed.parts[0], PackedLinear)
    assert torch.equal(products(packed, x)[:, :8], products(parts[0], x))


def test_a_plain_checkpoint_is_not_converted(tiny_model):
    with pytest.raises(ConfigError, match="w8a16 needs a quantised checkpoint"):
        plan_backend(tiny_model()[0], ModelConfig(device="cpu", quantization="w8a16"))


def test_memory_of_the_weights(tiny_model, tmp_path):
    """Linear layers have half of bfloat16's bytes, but for their scales; the plan says so."""
    plain = tiny_model()[0]
    config = ModelConfig(device="cpu", dtype="bfloat16")
    before, after = (
        plan_backend(directory, config)
        for directory in (plain, quantised(plain, tmp_path / "made"))
    )
    model = after.architecture.config
    assert after.weight_bytes == count_weight_bytes(model, 2, "int8")
    numbers = model.num_layers * (
        model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
        + 3 * model.hidden_size * model.intermediate_size
    )
    assert 0.8 * numbers < before.weight_bytes - after.weight_bytes < numbers
