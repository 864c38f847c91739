"""Every key of config.json at many values: our scores are transformers', or the file is refused."""

import json

import numpy as np
import pytest

from gpuscore.backends.shared.config_keys import (
    EVERY_NO_EFFECT,
    EVERY_USED,
    NEUTRAL,
    keys_of,
)
from support.differential import ABSENT, CLOSE, ODD, changed, difference, theirs
from support.models import CLASSIFIERS, FAMILIES, make_model

pytestmark = pytest.mark.hostile

KINDS = [*FAMILIES, *CLASSIFIERS]
ROPES = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
)
MORE = {
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "rope_theta": (500.0, 1e6),
    "layer_types": tuple([kind] * 3 for kind in ("sliding_attention", "full_attention")),
    "model_type": ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh", "relu"),
    "hidden_activation": ("silu", "gelu", "gelu_pytorch_tanh", "relu"),
    "sliding_window": (5,),
    "per_layer_config": ({"1": {"skip": ["mlp"]}}, {"0": {"rms_norm_eps": 0.5}}),
    "dtype": ("float16", "bfloat16"),
}


@pytest.fixture(params=KINDS)
def model(request, tmp_path):
    """A directory, and its config.json as it is good."""
    directory = tmp_path / request.param
    make_model(directory, request.param)
    return directory, json.loads((directory / "config.json").read_text())


def test_what_is_read_changes_nothing_unseen(model):
    directory, base = model
    keys = keys_of(base["architectures"][0])
    wrong = []
    for name in sorted(EVERY_USED | keys.used | NEUTRAL.keys() | {"model_type"}):
        for value in (*ODD, *MORE.get(name, ())):
            if value is ABSENT and name not in base:
                continue
            changed(directory, base, {name: value})
            apart = difference(directory)
            if apart is not None and not apart < CLOSE:
                wrong.append((name, value, apart))
    assert not wrong


def test_what_is_said_to_have_no_effect_has_none(model):
    """transformers' own answer, with each such key at odd values; private names as well."""
    directory, base = model
    names = EVERY_NO_EFFECT | keys_of(base["architectures"][0]).no_effect
    want, wrong = theirs(directory), []
    for name in sorted(names | {"_x", "_sliding_window_pattern", "_name_or_path"}):
        for value in (True, 3, 0.5, "x"):
            changed(directory, base, {name: value})
            found = theirs(directory)
            if not isinstance(found, str) and not np.allclose(found, want, atol=CLOSE):
                wrong.append((name, value))
    assert not wrong
