"""Promise: the log-probability of every token of a prompt equals transformers', in bounded
memory."""

import json
import sys
from itertools import accumulate

import numpy as np
import pytest
import torch

from gpuscore.arrays import NO_TOKENS
from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.engine.engine import Engine
from gpuscore.probabilities import position_logprobs
from gpuscore.request import ScoreRequest
from support.models import random_ids
from support.programs import run_module

LENGTHS = (1, 2, 63, 111, 130, 257, 33, 300)


def request_of(prompts):
    arrays = tuple(np.array(prompt, np.int32) for prompt in prompts)
    labels = tuple(np.roll(array, -1) for array in arrays)
    return ScoreRequest(NO_TOKENS, arrays, labels, True, need_top=True, every_position=True)


@pytest.fixture
def engine(tiny_model):
    made = []

    def make(family, **options):
        directory, _ = tiny_model(family, max_position_embeddings=1024)
        config = ModelConfig(str(directory), dtype="float32", compile="off", **options)
        made.append(Engine(create_backend(plan_backend(directory, config)), EngineConfig()))
        return made[-1]

    yield make
    for one in made:
        one.close()


def split(values):
    ends = [*accumulate(LENGTHS)]
    return [values[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_as_transformers_in_chunks_packed_and_alone(engine, tiny_model, family):
    """Gemma 2 has windows and soft caps."""
    rng = np.random.default_rng(0)
    prompts = [random_ids(rng, n) for n in LENGTHS]
    request = request_of(prompts)
    _, model = tiny_model(family, max_position_embeddings=1024)
    for max_batch_tokens in (49, 700):
        one = engine(family, max_batch_tokens=max_batch_tokens)
        found = position_logprobs(one.score(request).result(60), request.label_ids)
        for prompt, label, best, best_ids in zip(
            prompts, *map(split, (found.label, found.best, found.best_ids)), strict=True
        ):
            with torch.no_grad():
                logits = model(torch.tensor([prompt])).logits[0]
            want = torch.log_softmax(logits.double(), -1).numpy()
            following = want[np.arange(len(prompt)), np.roll(prompt, -1)]
            np.testing.assert_allclose(label, following, atol=1e-4, rtol=0)
            np.testing.assert_allclose(best, want.max(axis=1), atol=1e-4, rtol=0)
            np.testing.assert_array_equal(best_ids, want.argmax(axis=1))
            np.testing.assert_array_equal(label == best, np.roll(prompt, -1) == best_ids)


def test_deterministic(engine):
    """The bits are the same packed, alone and in chunks."""
    rng = np.random.default_rng(1)
    prompts = [random_ids(rng, n) for n in LENGTHS]

    def bits(one, some):
        result = one.score(request_of(some)).result(60)
        numbers = (np.concatenate(result.label_logits), result.lse, result.top_logits)
        return np.stack(numbers).view(np.int32)

    whole = engine("qwen3", deterministic=True, max_batch_tokens=1000)
    chunked = engine("qwen3", deterministic=True, max_batch_tokens=150)
    alone = np.concatenate([bits(whole, [prompt]) for prompt in prompts], axis=1)
    for one in (whole, chunked):
        np.testing.assert_array_equal(bits(one, prompts), alone)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_memory_is_not_tokens_times_vocabulary(tiny_model):
    """Score 2,000 tokens at once: their logits would take 0.3 GB, their keys row by row as much."""
    tokens, vocab = 2000, 40_000
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    directory, _ = tiny_model("qwen3", vocab_size=vocab, max_position_embeddings=4096, **sizes)
    done = run_module("support.position_memory", directory, tokens, vocab)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    assert grown is not None
    assert grown < 200 * 2**20, f"{grown / 2**20:.0f} MiB"
