"""Promise: a model that ranks share gives transformers' scores, packed or alone; a rank that ends,
at any time, ends the others with one clear line. `test_contract` runs on two ranks too."""

import os
import re
import signal
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpuscore import Scorer
from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.base import DeviceLost
from gpuscore.backends.torch.ranks import backend as parallel
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError, GpuscoreError
from support.batches import in_one_batch
from support.models import random_ids, reference_logprobs
from support.serving import children, running, wait_until
from support.slow import slow

TOLERANCE = 1e-4
LABELS = [3, 17, 399]


@pytest.mark.parametrize(
    ("family", "ranks", "options", "overrides"),
    [
        # Two ranks share one KV head, and one of them adds the biases.
        ("llama", 2, {}, {"num_key_value_heads": 1, "attention_bias": True}),
        *slow(
            ("llama", 4, {}, {"attention_bias": True}),  # of two KV heads
            ("qwen2", 2, {"compile": "on"}, {}),  # a tied head
            ("qwen3_moe", 2, {}, {}),
            ("gemma2", 2, {}, {}),  # soft-caps, windows, norms of what is added up
        ),
    ],
)
def test_ranks_score_as_transformers_does(tiny_model, family, ranks, options, overrides):
    directory, model = tiny_model(family, **overrides)
    rng = np.random.default_rng(0)
    query, items = random_ids(rng, 67), [random_ids(rng, n) for n in (1, 2, 20, 63, 111, 3)]
    asked = {"label_token_ids": LABELS, "logprobs": True}
    options = {"max_batch_tokens": 128, "tensor_parallel": ranks} | options
    with Scorer(str(directory), device="cpu", **options) as scorer:
        together = scorer.score(query, items, **asked)
        alone = [scorer.score(query, [item], **asked) for item in items]
    expected = reference_logprobs(model, [query + item for item in items])[:, LABELS]
    assert expected.std() > 1, "near-uniform outputs would prove nothing"
    np.testing.assert_allclose(together.logprobs, expected, atol=TOLERANCE, rtol=0)
    for row, result in enumerate(alone):
        np.testing.assert_allclose(result.logprobs[0], expected[row], atol=TOLERANCE, rtol=0)


def ranks_of_this_process(known):
    return [pid for pid in children(os.getpid()) if pid not in known]


@pytest.fixture
def two_ranks(tiny_model):
    """A function that loads two ranks, and the lines with which they were lost."""
    directory, _ = tiny_model("qwen3")
    config = ModelConfig(str(directory), device="cpu", tensor_parallel=2, max_batch_tokens=64)
    return lambda lost=lambda line: None: create_backend(plan_backend(directory, config), lost=lost)


def test_a_rank_that_is_killed_while_it_loads_ends_the_load(two_ranks):
    known, lines, messages = children(os.getpid()), [], []

    def load():
        with pytest.raises(DeviceLost) as caught:
            two_ranks(lines.append)
        messages.append(str(caught.value))

    loading = threading.Thread(target=load)
    loading.start()
    wait_until(lambda: ranks_of_this_process(known))
    (pid,) = ranks_of_this_process(known)
    os.kill(pid, signal.SIGKILL)
    loading.join(60)
    assert not loading.is_alive(), "it hangs"
    assert (
        messages == lines == [f"rank 1 of 2 (process {pid}) ended with signal 9; this replica ends"]
    )


def test_a_rank_that_is_killed_fails_the_batch(tiny_model):
    directory, _ = tiny_model("qwen3")
    known = children(os.getpid())
    with Scorer(str(directory), device="cpu", tensor_parallel=2, max_batch_tokens=64) as scorer:
        asked = {"label_token_ids": LABELS}
        assert scorer.score([1, 2, 3], [[4]], **asked).scores.shape == (1, 3)
        (pid,) = ranks_of_this_process(known)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(GpuscoreError):
            scorer.score([1, 2, 3], [[4]], **asked)
    assert not running(pid)


@pytest.mark.slow
def test_an_error_of_a_rank_ends_the_replica(two_ranks, monkeypatch):
    lines = []
    backend = two_ranks(lines.append)
    monkeypatch.setattr(parallel, "words_of", lambda batch: b"no batch")
    with pytest.raises(DeviceLost, match="rank 1 of 2"):
        backend.collect(backend.extend(in_one_batch([1, 2], [[3]], LABELS)))
    wait_until(lambda: lines)
    assert re.fullmatch(r"rank 1 of 2 \(process \d+\) failed: .+; this replica ends", lines[0])
    backend.close()


def test_what_another_rank_refuses_is_refused(tiny_model, tmp_path):
    """The second rank holds the last row of the head, which is refused there."""
    directory, _ = tiny_model("qwen3")
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][-1] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    known = children(os.getpid())
    with pytest.raises(ConfigError, match=r"^tensor lm_head.weight holds NaN or infinity"):
        Scorer(str(tmp_path), device="cpu", tensor_parallel=2, max_batch_tokens=64)
    assert not ranks_of_this_process(known)
