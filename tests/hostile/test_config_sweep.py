"""Promise: for every key of config.json, at many values, our scores are transformers', or the file
is refused."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpuscore.backends.common.config_keys import EVERY_NO_EFFECT, EVERY_USED, NEUTRAL, keys_of
from support.models import CLASSIFIERS, FAMILIES, make_model
from support.served_by_transformers import ABSENT, CLOSE, ODD, changed, difference, theirs

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

VALUES = (True, 3, 0.5, "x")


@pytest.fixture(params=KINDS)
def model(request, tmp_path):
    """A model directory and the content of its valid config.json."""
    directory = tmp_path / request.param
    make_model(directory, request.param)
    return directory, json.loads((directory / "config.json").read_text())


def tried(kind: str, base: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield keys and values to try. Keys of all architectures are tried on every third kind, each
    value on other kinds; keys of one architecture on that one."""
    own = keys_of(base["architectures"][0]).used
    for number, name in enumerate(sorted(EVERY_USED | own | NEUTRAL.keys() | {"model_type"})):
        values = [v for v in (*ODD, *MORE.get(name, ())) if v is not ABSENT or name in base]
        for place, value in enumerate(values, start=number):
            if name in own or (place + KINDS.index(kind)) % 3 == 0:
                yield name, value


def test_what_is_read_changes_nothing_unseen(model):
    directory, base = model
    wrong = []
    for name, value in tried(directory.name, base):
        changed(directory, base, {name: value})
        apart = difference(directory)
        if apart is not None and not apart < CLOSE:
            wrong.append((name, value, apart))
    assert not wrong


def test_what_is_said_to_have_no_effect_has_none(model):
    """transformers' own answer stays the same with such keys at odd values, private names
    included."""
    directory, base = model
    expected = theirs(directory)

    def harmful(names: list[str], value: object) -> list[str]:
        """Return those names that, set to the value, change the answer by themselves."""
        changed(directory, base, dict.fromkeys(names, value))
        scores = theirs(directory)
        if not isinstance(scores, str) and np.allclose(scores, expected, atol=CLOSE):
            return []
        if len(names) == 1:
            return [] if isinstance(scores, str) else names  # transformers refuses the value
        half = len(names) // 2
        return harmful(names[:half], value) + harmful(names[half:], value)

    names = EVERY_NO_EFFECT | keys_of(base["architectures"][0]).no_effect
    names = sorted(names | {"_x", "_sliding_window_pattern", "_name_or_path"})
    assert {str(v): harmful(names, v) for v in VALUES} == {str(v): [] for v in VALUES}
