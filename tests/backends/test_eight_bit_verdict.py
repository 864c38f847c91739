"""Promise: a plain checkpoint in INT8 is computed and judged by texts: held-out answers are
compared with the same model's answers in float32, and a model that differs by too much is
refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau

from gpuscore import Scorer
from gpuscore.backends import create_backend, plan_backend, recipe_of
from gpuscore.backends.common.eight_bits.judge import LEAST_TAU, Agreement, compared, judge
from gpuscore.backends.common.eight_bits.recipe import GROUPS, KeptRecipes, Recipe
from gpuscore.backends.common.eight_bits.texts import Questions, ask, read_texts
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.linear import DenseLinear
from gpuscore.backends.torch.recipes import FORMS
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.models.hub import model_directory
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


def test_the_recipe_is_kept_and_named(planned):
    plan, recipe = planned
    assert recipe.kept in FORMS
    assert recipe_of(plan) == recipe  # from the file
    assert Recipe.from_json(recipe.as_json()) == recipe
    other = replace(recipe, kept=("o",))
    assert other.fingerprint != recipe.fingerprint
    assert KeptRecipes(plan.settings.compile_cache).write(other) == recipe  # the first's
    backend = create_backend(plan)
    try:
        assert recipe.fingerprint in backend.limits.identity
        assert recipe.fingerprint in backend.limits.eight_bits
    finally:
        backend.close()


@pytest.mark.parametrize("kept", [(), ("down", "q"), ("up",), tuple(GROUPS)])
def test_the_backend_keeps_in_16_bits_what_the_recipe_says(planned, kept):
    plan, recipe = planned
    backend = TorchBackend(plan, recipe=replace(recipe, kept=kept))
    mixed = ("gate" in kept) != ("up" in kept)
    for layer in backend.launcher.decoder.weights.layers:
        of_groups = {"q": layer.qkv, "o": layer.o, "down": layer.mlp.down}
        gate_up = layer.mlp.gate_up
        sides = gate_up.parts if mixed else (gate_up, gate_up)
        of_groups |= dict(zip(("gate", "up"), sides, strict=True))
        for group, linear in of_groups.items():
            dense = {isinstance(part, DenseLinear) for part in getattr(linear, "parts", (linear,))}
            assert dense == {group in kept}
    backend.close()


def test_answers_are_those_of_the_model_in_float32(planned):
    plan, recipe = planned
    directory = model_directory("demo")
    with Scorer(str(directory), device="cpu", dtype="float32") as scorer:
        for prompt, expected in list(zip(recipe.prompts, recipe.answers, strict=True))[:7]:
            ids = {"label_token_ids": list(recipe.labels), "logprobs": True}
            got = scorer.score(list(prompt[:-1]), [[prompt[-1]]], **ids).logprobs[0]
            np.testing.assert_allclose(got, expected, atol=1e-3)


def test_tau_b_is_that_of_scipy():
    rng = np.random.default_rng(0)
    expected, got = rng.integers(0, 9, (2, 50, 2)).astype(float)
    tau = kendalltau(expected[:, 0] - expected[:, 1], got[:, 0] - got[:, 1]).statistic
    assert compared(expected, got).tau_b == pytest.approx(tau)


def test_a_form_is_chosen_only_if_other_texts_would_probably_agree():
    surely = Agreement(error=0.1, spread=0.01, tau_b=LEAST_TAU + 0.03, flips=0, texts=110)
    assert surely.at_most(0.12)
    for less in ({"spread": 0.03}, {"tau_b": LEAST_TAU + 0.01}):
        agreement = replace(surely, **less)
        assert agreement.problem(0.12) is None
        assert not agreement.at_most(0.12)
    assert "tau-b has to be" in replace(surely, tau_b=LEAST_TAU - 0.01).problem(0.12)
    assert "at most 5% may flip" in replace(surely, flips=6).problem(0.12)


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


def test_random_ids_judge_a_model_without_a_tokenizer(tmp_path, tiny_model, caplog):
    made, reference = tiny_model("qwen3")
    directory = shutil.copytree(made, tmp_path / "model")
    (directory / "tokenizer.json").unlink()
    settings = {"device": "cpu", "quantization": "int8", "quantization_error": 1.0}
    plan = plan_backend(directory, ModelConfig(compile_cache=str(tmp_path), **settings))
    recipe = recipe_of(plan)
    assert "random ids judge" in caplog.text
    assert len(recipe.prompts) == 200
    assert len({*recipe.prompts}) == 200
    for prompt, expected in list(zip(recipe.prompts, recipe.answers, strict=True))[:5]:
        logits = reference(torch.tensor([prompt])).logits[0, -1].detach()
        got = logits.log_softmax(-1)[list(recipe.labels)].numpy()
        np.testing.assert_allclose(got, expected, atol=1e-4)
    create_backend(plan).close()
    with pytest.raises(ConfigError, match="of 200 held-out texts, but --quantization-error"):
        create_backend(replace(plan, settings=replace(plan.settings, quantization_error=1e-6)))


@pytest.mark.parametrize("name", ["qwen3-int8", "qwen3-moe-int8"])
def test_a_checkpoint_that_others_quantised_is_judged_too(tmp_path, name):
    """Answers in float32 have its own weights, and activations that are not rounded."""
    directory = Path(__file__).parents[1] / "fixtures/quantized" / name
    settings = {"device": "cpu", "dtype": "float32", "allow_degenerate": True}
    plan = plan_backend(directory, ModelConfig(compile_cache=str(tmp_path), **settings))
    recipe = recipe_of(plan)
    assert recipe.kept == ()
    with Scorer(str(directory), device="cpu", dtype="float32", quantization="w8a16") as scorer:
        for prompt, expected in list(zip(recipe.prompts, recipe.answers, strict=True))[:5]:
            ids = {"label_token_ids": list(recipe.labels), "logprobs": True}
            got = scorer.score(list(prompt), [[]], **ids).logprobs[0]
            np.testing.assert_allclose(got, expected, atol=1e-4)
    strict = replace(plan.settings, quantization_error=1e-6, allow_degenerate=False)
    with pytest.raises(ConfigError, match="a quantised checkpoint: with --quantization w8a16"):
        create_backend(replace(plan, settings=strict))
