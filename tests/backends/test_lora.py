"""Promise: `--adapter` gives the scores of peft's merge_and_unload, or refuses the adapter.

tests/fixtures/adapters has adapters and answers that peft made.
"""

import json
import shutil
from functools import cache

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gpuscore import Scorer
from gpuscore.errors import ConfigError
from gpuscore.models.adapter import CONFIG, WEIGHTS
from support.adapters import BASE, CASES, FOLDER, PROMPTS

LABELS = list(range(64))


def scores(adapter, /, **settings):
    """Return [prompts, labels]: log-probabilities, or the logits of classes."""
    name = adapter.name
    classes = CASES[name].classes if name in CASES else None
    options = {"device": "cpu", "dtype": "float32", "max_batch_tokens": 64}
    options |= {"adapter": str(adapter), **settings}
    with Scorer(str(BASE), **options) as scorer:
        labels = LABELS if classes is None else list(range(classes))
        answer = scorer.score([], PROMPTS, label_token_ids=labels, logprobs=True, logits=True)
        return answer.logprobs if classes is None else answer.logits


@cache
def of_the_base_alone():
    return scores(BASE, adapter=None)


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "torch") for name in CASES), ("all-layers", "jax")],
)
def test_the_scores_of_peft(name, backend):
    expected = np.array(json.loads((FOLDER / name / "answers.json").read_text()))
    got = scores(FOLDER / name, backend=backend)
    assert np.abs(got - expected).max() < 1e-5
    if CASES[name].classes is None:
        assert np.abs(of_the_base_alone() - expected).max() > 1e-2


def test_two_ranks_merge_their_parts():
    expected = np.array(json.loads((FOLDER / "patterns" / "answers.json").read_text()))
    got = scores(FOLDER / "patterns", tensor_parallel=2, threads=1)
    assert np.abs(got - expected).max() < 1e-5


def changed(tmp_path, name, fields=None, tensors=None, drop=()):
    """Return a copy of an adapter with other settings and tensors."""
    made = tmp_path / "made"
    shutil.copytree(FOLDER / name, made)
    settings = json.loads((made / CONFIG).read_text()) | (fields or {})
    (made / CONFIG).write_text(json.dumps(settings))
    kept = {k: v for k, v in load_file(made / WEIGHTS).items() if k not in drop}
    save_file(kept | (tensors or {}), made / WEIGHTS)
    return made


LAYER = "base_model.model.model.layers.0.self_attn.q_proj."
ODD = {"x": np.ones((2, 2), np.float32)}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("patterns", {"use_dora": True}, "use_dora is True; supported"),
        ("patterns", {"peft_type": "IA3"}, "peft_type is 'IA3'; supported: 'LORA'"),
        ("patterns", {"bias": "all"}, "bias is 'all'"),
        ("patterns", {"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ("patterns", {"lora_alpha": "2"}, "lora_alpha must be a number, found '2'"),
        ("patterns", {"trainable_token_indices": [3]}, "trainable_token_indices is"),
        ("patterns", {"task_type": "SEQ_CLS"}, "has no base_model.model.score.weight"),
    ],
)
def test_what_is_not_merged(tmp_path, name, fields, message):
    with pytest.raises(ConfigError, match=message):
        scores(changed(tmp_path, name, fields))


@pytest.mark.parametrize(
    ("tensors", "drop", "message"),
    [
        ({f"{LAYER}lora_magnitude_vector": np.ones(16, np.float32)}, (), "lora_magnitude_vector"),
        ({"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": ODD["x"]}, (), "layers.7"),
        ({f"{LAYER}lora_A.weight": np.ones((4, 32), np.float32)}, (), r"A of .*q_proj.weight is"),
        ({f"{LAYER}lora_B.weight": np.ones((9, 4), np.float32)}, (), r"needed"),
        ({}, (f"{LAYER}lora_B.weight",), r"B of model.layers.0.self_attn.q_proj.weight is missing"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, tensors, drop, message):
    """An adapter of another base model has other shapes."""
    with pytest.raises(ConfigError, match=message):
        scores(changed(tmp_path, "patterns", tensors=tensors, drop=drop))


def test_no_adapter(tmp_path):
    with pytest.raises(ConfigError, match=r"--adapter .* has no adapter_config\.json"):
        scores(tmp_path)
    shutil.copy(FOLDER / "patterns" / CONFIG, tmp_path)
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        scores(tmp_path)
