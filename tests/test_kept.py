"""Promise: scores of transformers that were kept from an earlier run belong to the same model,
versions and prompts, or are not used."""

import numpy as np
import pytest
import torch

from support import kept
from support.models import make_model

PROMPT = [[5, 6, 7], [8, 9, 10]]


@pytest.fixture(autouse=True)
def _not_recomputed(monkeypatch):
    monkeypatch.delenv(kept.RECOMPUTE, raising=False)


@pytest.fixture
def asked(tmp_path):
    """asked(model, prompts) returns whether its scores were computed, and the scores."""

    def ask(model, what="logits", prompts=PROMPT):
        computed = []

        def compute():
            computed.append(True)
            with torch.no_grad():
                return model(torch.tensor(prompts)).logits.numpy()

        scores = kept.scores_of(model, what, prompts, compute, tmp_path / "kept")
        return bool(computed), scores

    return ask


def test_the_same_model_made_again_is_not_asked(asked, tmp_path):
    computed, first = asked(make_model(tmp_path))
    again, second = asked(make_model(tmp_path))
    assert (computed, again) == (True, False)
    np.testing.assert_array_equal(first, second)


def test_another_model_prompt_or_version_is_computed_anew(asked, tmp_path, monkeypatch):
    model = make_model(tmp_path)
    assert asked(model)[0]
    others = [
        make_model(tmp_path, seed=1),
        make_model(tmp_path, rope_theta=1e5),  # the same weights
        make_model(tmp_path, "llama"),
    ]
    other_attention = make_model(tmp_path)
    other_attention.set_attn_implementation("sdpa")
    one_weight = make_model(tmp_path)
    with torch.no_grad():
        one_weight.lm_head.weight[3, 4] += 1e-6
    for other in (*others, other_attention, one_weight):
        assert asked(other)[0]
    assert asked(model, "other numbers")[0]
    assert asked(model, prompts=PROMPT[:1])[0]
    assert asked(model, prompts=PROMPT[::-1])[0]
    assert not asked(model)[0]
    installed = dict(kept.libraries())
    assert installed.keys() == {"transformers", "torch", "numpy"}
    for name in installed:
        other = [*(installed | {name: "0"}).items()]
        with monkeypatch.context() as patch:
            patch.setattr(kept, "libraries", lambda other=other: other)
            assert asked(make_model(tmp_path))[0]


def test_a_directory_is_that_of_its_arguments_and_of_the_code(tmp_path, monkeypatch):
    def make(**overrides):
        return kept.model_directory("qwen3", overrides, tmp_path / "kept")

    directory = make(num_hidden_layers=1)
    assert (directory / "tokenizer.json").exists()
    assert make(num_hidden_layers=1) == directory
    assert make(num_hidden_layers=2) != directory
    source = tmp_path / "models.py"
    source.write_text("other code")
    monkeypatch.setattr(kept, "SOURCES", (source,))
    assert make(num_hidden_layers=1) != directory


def test_recomputing_finds_what_is_wrong(asked, tmp_path, monkeypatch):
    model = make_model(tmp_path)
    _, right = asked(model)
    monkeypatch.setenv(kept.RECOMPUTE, "1")
    assert asked(model)[0]
    (path,) = (tmp_path / "kept").rglob("*.npy")
    np.save(path, right + 1e-6)
    with pytest.raises(AssertionError, match=path.name):
        asked(model)
    directory = kept.model_directory("qwen3", {}, tmp_path / "kept")
    assert kept.model_directory("qwen3", {}, tmp_path / "kept") == directory
    (directory / "config.json").write_text("{}")
    with pytest.raises(AssertionError, match="config.json is not what qwen3 with"):
        kept.model_directory("qwen3", {}, tmp_path / "kept")
