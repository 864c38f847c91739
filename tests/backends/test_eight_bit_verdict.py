"""Promise: a plain checkpoint in INT8 is computed and judged by texts: held-out answers are
compared with those of the same model in 16 bits, and a model that differs by too much is
refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau

from gpuscore import Scorer
from gpuscore.backends import create_backend, plan_backend, recipe_of
from gpuscore.backends.common.eight_bits.judge import compared, judge
from gpuscore.backends.common.eight_bits.recipe import GROUPS, KeptRecipes, Recipe
from gpuscore.backends.common.eight_bits.texts import Questions, ask, read_texts
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.linear import Products, QuantizedLinear, pack
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.models.hub import model_directory
from gpuscore_kernels.quantized.reference import quantize_rows
from support.eight_bits import needs_int8

pytestmark = needs_int8


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Return the plan of the demo in INT8, and its recipe, which is kept in a folder."""
    folder = tmp_path_factory.mktemp("kept")
    config = ModelConfig(
        device="cpu", quantization="int8", compile_cache=str(folder), max_batch_tokens=512
    )
    plan = plan_backend(model_directory("demo"), config)
    return plan, recipe_of(plan)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_taken_twice_are_nearly_exact(packed, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 130, generator=generator)
    x[:, 5] *= 100  # a channel that costs the others their bits
    x, bias = x.to(dtype), torch.randn(33, generator=generator).to(dtype)
    w, scale = quantize_rows(torch.randn(33, 130, generator=generator), torch.int8)
    want = x.double() @ (w.double() * scale[:, None]).T + bias.double()
    errors = []
    for twice in (False, True):
        layer = QuantizedLinear(w, scale, bias, twice)
        got = Products()(pack(layer) if packed else layer, x)
        assert got.dtype == dtype
        errors.append(float((got - want).norm() / want.norm()))
    assert errors[0] > 2e-3
    assert errors[1] < {torch.float32: 2e-4, torch.bfloat16: 2e-3}[dtype]
    alone = [Products()(pack(layer) if packed else layer, row[None])[0] for row in x]
    assert torch.equal(torch.stack(alone), got)


def test_the_recipe_is_kept_and_named(planned):
    plan, recipe = planned
    assert len(recipe.twice) == plan.architecture.config.num_layers
    assert {group for groups in recipe.twice for group in groups} <= set(GROUPS)
    assert recipe_of(plan) == recipe  # from the file
    assert Recipe.from_json(recipe.as_json()) == recipe
    other = replace(recipe, twice=(("q",), *recipe.twice[1:]))
    assert other.fingerprint != recipe.fingerprint
    assert KeptRecipes(plan.settings.compile_cache).write(other) == recipe  # the first's
    backend = create_backend(plan)
    try:
        assert recipe.fingerprint in backend.limits.identity
        assert recipe.fingerprint in backend.limits.eight_bits
    finally:
        backend.close()


def test_the_backend_takes_rows_as_the_recipe_says(planned):
    plan, recipe = planned
    backends = []
    for groups in ((), tuple(GROUPS), ("q", "down")):
        every = tuple(groups for _ in recipe.twice)
        backends.append(TorchBackend(plan, recipe=replace(recipe, twice=every)))
    for groups, backend in zip(((), tuple(GROUPS), ("q", "down")), backends, strict=True):
        for layer in backend.launcher.decoder.weights.layers:
            of_groups = {"q": layer.qkv, "o": layer.o, "gate": layer.mlp.gate_up}
            of_groups["down"] = layer.mlp.down
            for group, linear in of_groups.items():
                parts = getattr(linear, "parts", (linear,))
                assert all(part.twice == (group in groups) for part in parts)
        backend.close()


def test_answers_are_those_of_the_model_in_16_bits(planned):
    plan, recipe = planned
    directory = model_directory("demo")
    with Scorer(str(directory), device="cpu", dtype=plan.dtype_name) as scorer:
        for prompt, want in list(zip(recipe.prompts, recipe.answers, strict=True))[:7]:
            ids = {"label_token_ids": list(recipe.labels), "logprobs": True}
            got = scorer.score(list(prompt[:-1]), [[prompt[-1]]], **ids).logprobs[0]
            np.testing.assert_allclose(got, want, atol=1e-3)


def test_tau_b_is_that_of_scipy():
    rng = np.random.default_rng(0)
    want, got = rng.integers(0, 9, (2, 50, 2)).astype(float)
    tau = kendalltau(want[:, 0] - want[:, 1], got[:, 0] - got[:, 1]).statistic
    assert compared(want, got).tau_b == pytest.approx(tau)


def test_scales_of_another_layer_are_refused(planned):
    """Planted: two layers' scales of `down` change places."""
    plan, recipe = planned
    backend = TorchBackend(plan, recipe=recipe)
    try:
        judge(backend, recipe, 0.5, allow=False)
        layers = backend.launcher.decoder.weights.layers
        first, last = layers[0].mlp.down.scale, layers[-1].mlp.down.scale
        kept = first.clone()
        first.copy_(last * 3)
        last.copy_(kept / 3)
        with pytest.raises(ConfigError, match=r"mean error in log p .* held-out texts, but"):
            judge(backend, recipe, 0.05, allow=False)
        judge(backend, recipe, 0.05, allow=True)
    finally:
        backend.close()


def test_texts_of_the_verdict_are_held_out(tmp_path):
    questions = ask(model_directory("demo"), read_texts(None), 512, None)
    assert len(questions.held_out) >= 200
    assert not {*questions.scaled} & {*questions.held_out}
    with pytest.raises(ConfigError, match="1 prompts of the verdict"):
        Questions(questions.scaled, (*questions.held_out, questions.scaled[3]), questions.labels)
    few = tmp_path / "few.txt"
    few.write_text("One.\nTwo.\nOne.\n")
    with pytest.raises(ConfigError, match="has 2 different lines; needed: 300"):
        read_texts(str(few))
