"""Promise: hidden states are rotated exactly: with all products in float32, a model whose weights
are rotated as INT8 needs them answers as transformers does."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from gpuscore.backends import plan_backend
from gpuscore.backends.common.eight_bits import rotation
from gpuscore.backends.common.eight_bits.judge import answers_of, judge
from gpuscore.backends.common.eight_bits.recipe import GROUPS, Recipe
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from support.backends import needs_jax
from support.eight_bits import needs_int8
from support.models import random_ids

pytestmark = needs_int8
LABELS = (3, 9, 21)
BACKENDS = ["torch", pytest.param("jax", marks=needs_jax)]


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Rotate although all products are in float32, which a start would not do."""
    monkeypatch.setattr(rotation, "READERS", {"other"})


def planned(tiny_model, family, backend="torch"):
    """Return a plan in INT8, and a recipe that keeps everything in float32, with transformers'
    answers."""
    directory, model = tiny_model(family)
    rng = np.random.default_rng(0)
    prompts = [tuple(random_ids(rng, count)) for count in (5, 19, 9, 30, 2)]
    with torch.no_grad():
        every = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    if model.config.architectures[0].endswith("ForCausalLM"):
        answers, labels = [x[-1].log_softmax(-1)[list(LABELS)] for x in every], LABELS
    else:
        answers = [x.log_softmax(-1) for x in every]
        labels = tuple(range(len(answers[0])))
    config = ModelConfig(device="cpu", dtype="float32", quantization="int8", backend=backend)
    plan = plan_backend(directory, config)
    numbers = tuple(tuple(x.tolist()) for x in answers)
    return plan, Recipe("0" * 64, tuple(GROUPS), tuple(prompts), labels, numbers)


def backend_of(plan, recipe):
    if plan.framework == "torch":
        return TorchBackend(plan, recipe=recipe)
    from gpuscore.backends.jax.backend import JaxBackend

    return JaxBackend(plan, recipe=recipe)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "llama_classes"])
def test_a_rotated_model_answers_as_transformers_does(tiny_model, family, backend):
    plan, recipe = planned(tiny_model, family, backend)
    assert rotation.is_rotated(plan.architecture, plan.precision)
    made = backend_of(plan, recipe)
    try:
        assert judge(made, recipe, 1e-4, allow=False).error < 2e-5
    finally:
        made.close()


@needs_jax
@pytest.mark.parametrize("kept", [(), ("down", "up"), ("q",)])
def test_jax_computes_the_model_of_a_recipe_as_torch_does(tiny_model, kept):
    every = []
    for backend in ("torch", "jax"):
        plan, recipe = planned(tiny_model, "llama", backend)
        recipe = replace(recipe, kept=kept)
        made = backend_of(plan, recipe)
        every.append(answers_of(made, recipe))
        made.close()
    off = np.abs(every[0] - recipe.answers).max(axis=1)
    assert np.median(np.abs(every[0] - every[1]).max(axis=1)) < 1e-4 < np.median(off) / 10


def test_norms_that_add_one_are_folded(tiny_model):
    plan, recipe = planned(tiny_model, "gemma")
    backend = TorchBackend(plan, recipe=recipe)
    assert plan.architecture.config.one_plus_norms
    assert backend.launcher.decoder.weights.rotation is not None
    judge(backend, recipe, 1e-4, allow=False)
    backend.close()


def test_products_in_16_bits_are_not_rotated(tiny_model, monkeypatch):
    monkeypatch.undo()
    plan, recipe = planned(tiny_model, "llama")
    for kept, rotated in ((("q", "gate", "up"), False), (("q", "down"), True)):
        backend = TorchBackend(plan, recipe=replace(recipe, kept=kept))
        assert (backend.launcher.decoder.weights.rotation is not None) == rotated
        backend.close()


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_other_models_are_not_rotated(tiny_model, family):
    plan, recipe = planned(tiny_model, family)
    backend = TorchBackend(plan, recipe=replace(recipe, kept=()))
    assert backend.launcher.decoder.weights.rotation is None
    backend.close()


def rotation_that_is_not_undone(decoder):
    embed, matrix = decoder.embed, decoder.weights.rotation
    decoder.embed = lambda tokens: embed(tokens) @ matrix
    decoder.weights = replace(decoder.weights, rotation=torch.eye(len(matrix)))


def output_that_is_not_rotated(decoder):
    first, *others = decoder.weights.layers
    plain = replace(first.o, weight=decoder.weights.rotation @ first.o.weight)
    decoder.weights = replace(decoder.weights, layers=(replace(first, o=plain), *others))


def norm_that_is_not_folded(decoder):
    first, *others = decoder.weights.layers
    wrong = replace(first, mlp_norm=1 + torch.arange(len(first.mlp_norm)) / 100)
    decoder.weights = replace(decoder.weights, layers=(wrong, *others))


DEFECTS = [rotation_that_is_not_undone, output_that_is_not_rotated, norm_that_is_not_folded]


@pytest.mark.parametrize("plant", DEFECTS)
def test_planted_defects_are_refused(tiny_model, plant):
    plan, recipe = planned(tiny_model, "qwen2")
    backend = TorchBackend(plan, recipe=recipe)
    try:
        decoder = backend.launcher.decoder
        plant(decoder)
        with pytest.raises(ConfigError, match="does not answer as in float32: mean error in log p"):
            judge(backend, recipe, 0.01, allow=False)
    finally:
        backend.close()


@pytest.mark.parametrize("width", [7, 48, 64, 576])
def test_the_matrix_is_orthogonal_and_has_the_same_bits_everywhere(width):
    matrix = rotation.rotation(width)
    wide = matrix.astype(np.float64)
    assert np.abs(wide @ wide.T - np.eye(width)).max() < 3e-6
    rows = np.random.default_rng(0).standard_normal((5, width)).astype(np.float32)
    np.testing.assert_allclose(rotation.rotated(rows), rows @ wide, atol=1e-5)
    # One large channel, as real models have, is spread over all of them.
    rows[:, 3] = 1000
    assert np.abs(rotation.rotated(rows)).max() < 1.5 * 1000 * (2 / width) ** 0.5 + 10
    if width == 576:  # written down, so that another machine's sums would be seen
        assert hashlib.sha256(matrix.tobytes()).hexdigest()[:16] == "a1ebd818907e73c8"
