"""Promise: scaled rotary embeddings are those of transformers, below and above the original length.

A tiny model of 512 positions whose prompts of 9, 40 and 500 tokens are shorter, longer and much
longer than the original length of 24.
"""

import json

import numpy as np
import pytest

from gpuscore import Scorer
from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.errors import ConfigError
from support.models import VOCAB, make_model, random_ids, reference_logprobs

PROMPTS = [random_ids(np.random.default_rng(5), length) for length in (9, 40, 500)]
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0},
    "original_max_position_embeddings": 24,
}
ROWS = {
    "plain": {},
    "truncate": {"truncate": False},
    "betas": {"beta_fast": 4.0, "beta_slow": 0.5},
    "equal-bounds": {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "attention-factor": {"attention_factor": 0.75},
    "mscales": {"mscale": 1.2, "mscale_all_dim": 0.4},
    "one-mscale": {"mscale": 0.8},
    "less-than-1": {"factor": 0.5},
    "no-original-length": {"original_max_position_embeddings": None},
}


def scores(directory, backend):
    with Scorer(
        str(directory), backend=backend, device="cpu", dtype="float32", max_batch_tokens=64
    ) as scorer:
        answer = scorer.score([], PROMPTS, label_token_ids=list(range(VOCAB)), logprobs=True)
        return answer.logprobs


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "torch") for name in ROWS), ("truncate", "jax")],
)
def test_yarn(tmp_path, name, backend):
    rope = {key: value for key, value in (YARN | ROWS[name]).items() if value is not None}
    model = make_model(tmp_path, rope_parameters=rope)
    expected = reference_logprobs(model, PROMPTS)
    plain = make_model(tmp_path / "plain", rope_parameters={"rope_type": "default"})
    assert np.abs(scores(tmp_path, backend) - expected).max() < 1e-4
    assert np.abs(reference_logprobs(plain, PROMPTS) - expected).max() > 1e-2


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_yarn_in_other_architectures(tmp_path, family):
    """Gemma 2 has a scale of its own, and a soft cap after it."""
    model = make_model(tmp_path, family, rope_parameters=YARN)
    assert np.abs(scores(tmp_path, "torch") - reference_logprobs(model, PROMPTS)).max() < 1e-4


def test_dynamic(tmp_path):
    """It changes prompts over max_position_embeddings only, which are refused."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = make_model(tmp_path, rope_parameters=rope)
    assert np.abs(scores(tmp_path, "torch") - reference_logprobs(model, PROMPTS)).max() < 1e-4


def test_the_longest_prompt_is_that_of_yarn(tmp_path):
    """Qwen's files keep max_position_embeddings beside YaRN's factor."""
    make_model(tmp_path, rope_parameters=YARN | {"original_max_position_embeddings": 256})
    fields = json.loads((tmp_path / "config.json").read_text())
    assert read_architecture(RawConfig(fields)).config.max_position_embeddings == 8 * 256
    make_model(tmp_path, rope_parameters=YARN)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert read_architecture(RawConfig(fields)).config.max_position_embeddings == 512


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factor": 0}, "factor must be a positive number"),
        ({"beta_fast": "32"}, "beta_fast must be a positive number"),
        ({"truncate": 1}, "truncate must be true or false"),
        ({"original_max_position_embeddings": 2.5}, "original_max_position_embeddings must be"),
        ({"short_factor": [1.0]}, "has 'short_factor', which rope_type yarn does not"),
        ({"rope_type": "longrope", "long_factor": [4.0]}, "rope_type longrope, whose frequencies"),
    ],
)
def test_what_is_no_yarn(tmp_path, fields, message):
    make_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"rope_parameters": YARN | fields}
    with pytest.raises(ConfigError, match=message):
        read_architecture(RawConfig(config))
