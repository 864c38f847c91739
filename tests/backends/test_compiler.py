"""Promise: compiled and eager code give the same scores; if there is no compiler, one warning says
so."""

import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from gpuscore import Scorer
from gpuscore.backends import plan_backend
from gpuscore.backends.torch import compiler
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.layers import add_and_norm
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from support.models import random_ids, reference_logprobs

LABELS = [3, 17, 399]
CPU = torch.device("cpu")


@pytest.mark.slow
def test_compiled_scores_equal_transformers(tiny_model):
    directory, model = tiny_model("qwen3")
    rng = np.random.default_rng(0)
    query, items = random_ids(rng, 75), [random_ids(rng, n) for n in (3, 9, 1, 20, 33)]
    with Scorer(str(directory), compile="on", max_batch_tokens=64) as scorer:
        for some in (items, items[:1], items[2:3]):  # several rows, then a single one
            result = scorer.score(query, some, label_token_ids=LABELS, logprobs=True)
            want = reference_logprobs(model, [query + item for item in some])[:, LABELS]
            np.testing.assert_allclose(result.logprobs, want, atol=1e-4, rtol=0)


def test_compiled_for_any_number_of_rows(monkeypatch):
    """One compiled function serves all sizes, also 0 and 1 rows, for which torch.compile would
    specialise."""
    from torch._dynamo import config, reset  # take seconds to import
    from torch._inductor import codecache

    # Only names what torch keeps on disk, by a hash of all of Triton's files: a second of a core.
    monkeypatch.setattr(codecache, "triton_key", lambda: None)
    reset()  # other tests have compiled the function in other modes
    fast = compiler.compiled(add_and_norm)
    weight = torch.randn(48)
    with config.patch(error_on_recompile=True):
        for rows in (5, 0, 1, 2, 100):
            x, residual = torch.randn(rows, 48), torch.randn(rows, 48)
            torch.testing.assert_close(
                fast(x, residual, weight, 1e-5, False),
                add_and_norm(x, residual, weight, 1e-5, False),
            )


def test_auto_leaves_small_models_alone(tiny_model):
    assert not plan_backend(tiny_model()[0], ModelConfig()).compile
    assert compiler.use_compiler("auto", CPU, 600_000_000)
    assert not compiler.use_compiler("auto", CPU, 99_000_000)
    assert not compiler.use_compiler("off", CPU, 600_000_000)
    assert compiler.use_compiler("on", CPU, 1)


def test_without_a_compiler(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert not compiler.use_compiler("auto", CPU, 600_000_000)
    assert [record.message for record in caplog.records] == [
        "no C++ compiler no-such-compiler: element-wise work runs eagerly, slower"
    ]
    with pytest.raises(ConfigError, match="--compile on: there is no C"):
        compiler.use_compiler("on", CPU, 600_000_000)


def test_only_for_cpus():
    cuda = torch.device("cuda")
    assert not compiler.use_compiler("auto", cuda, 600_000_000)
    with pytest.raises(ConfigError, match="device is cuda; supported: cpu"):
        compiler.use_compiler("on", cuda, 600_000_000)


@pytest.fixture
def settings(monkeypatch):
    """settings(): torch's after `prepare` in a thread of its own, and this thread's before."""
    from torch._inductor import config

    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setattr(compiler.platform, "machine", lambda: "x86_64")

    def read():
        return config.compile_threads, config.cpp.vec_isa_ok

    def prepared():
        with ThreadPoolExecutor(1) as other:
            before = read()
            other.submit(compiler.prepare).result()
            assert read() == before, "a program's own use of torch.compile is left alone"
            return other.submit(read).result()

    return prepared


@pytest.mark.skipif(sys.platform != "linux", reason="flags of the compiler on Linux")
def test_a_start_tries_out_no_vectors(settings):
    assert settings() == (1, True)


def test_a_compiler_without_the_flags_is_left_to_torch(settings, monkeypatch, tmp_path):
    refusing = tmp_path / "old-g++"
    refusing.write_text('#!/bin/sh\ncase "$*" in *-mamx-bf16*) exit 1;; esac\n')
    refusing.chmod(0o755)
    monkeypatch.setenv("CXX", str(refusing))
    assert settings() == (1, None)


def test_the_environment_comes_first(settings, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")
    from torch._inductor import config

    assert settings()[0] == config.compile_threads


def test_a_failed_load_leaves_no_thread(tiny_model, tmp_path):
    directory, _ = tiny_model("qwen3")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    plan = plan_backend(tmp_path, ModelConfig(str(tmp_path), compile="on"))
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="has neither model.safetensors") as error:
        TorchBackend(plan)
    assert error.tb is not None  # it holds the backend, so nothing but `close` has ended the thread
    new = set(threading.enumerate()) - before
    assert not [thread.name for thread in new if thread.name.startswith("torch-backend")]
