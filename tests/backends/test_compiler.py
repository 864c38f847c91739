"""Promise: functions in C and eager code give the same scores; a function that computes something
else is refused at start; where there is no C compiler, one warning says so."""

import logging
import sys
import threading
from functools import partial

import numpy as np
import pytest
import torch

from gpuscore import Scorer
from gpuscore.backends import plan_backend
from gpuscore.backends.torch import compiler, rows_in_c
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.commands import doctor
from gpuscore.config import ModelConfig, ServerConfig
from gpuscore.errors import ConfigError
from gpuscore_kernels.row_functions.attention import AttentionFunctions
from gpuscore_kernels.row_functions.build import FORMATS, LEVELS, build_ahead, find_prebuilt, load
from gpuscore_kernels.row_functions.delta import DeltaFunctions
from gpuscore_kernels.row_functions.functions import RowFunctions
from support.models import random_ids, reference_logprobs
from support.slow import slow

LABELS = [3, 17, 399]
CPU = torch.device("cpu")
ALL = 600_000_000  # parameters

DEFECTS = [
    (RowFunctions, "gated", "qwen3"),
    (RowFunctions, "norm_and_rotate", "qwen3"),
    *slow(
        (RowFunctions, "add_and_norm", "qwen3"),
        (AttentionFunctions, "extend_attention", "qwen3"),
        (DeltaFunctions, "convolve", "qwen3_5"),
        (DeltaFunctions, "delta_rule", "qwen3_5"),
        (DeltaFunctions, "gated_norm", "qwen3_5"),
    ),
]


@pytest.mark.parametrize(
    "family", ["qwen3", "qwen3_5", *slow("gemma2", "gemma3", "qwen3_moe", "llama")]
)
def test_scores_equal_transformers(tiny_model, family):
    directory, model = tiny_model(family)
    rng = np.random.default_rng(0)
    query, items = random_ids(rng, 75), [random_ids(rng, n) for n in (3, 9, 1, 20, 33)]
    with Scorer(str(directory), compile="on", max_batch_tokens=64) as scorer:
        for some in (items, items[:1], items[2:3]):  # several rows, then a single one
            result = scorer.score(query, some, label_token_ids=LABELS, logprobs=True)
            expected = reference_logprobs(model, [query + item for item in some])[:, LABELS]
            np.testing.assert_allclose(result.logprobs, expected, atol=1e-4, rtol=0)


def test_an_item_alone_and_packed(tiny_model):
    """An item's scores have the same bits with other items of its length as without a neighbour."""
    rng = np.random.default_rng(1)
    query, items = random_ids(rng, 40), [random_ids(rng, 8) for _ in range(4)]
    with Scorer(str(tiny_model("qwen3")[0]), compile="on", deterministic=True) as scorer:
        together = scorer.score(query, items, label_token_ids=LABELS, logprobs=True).logprobs
        for item, expected in zip(items, together, strict=True):
            alone = scorer.score(query, [item], label_token_ids=LABELS, logprobs=True).logprobs
            assert (alone[0] == expected).all()


@pytest.mark.parametrize(("owner", "name", "family"), DEFECTS)
def test_a_defect_is_found_at_start(tiny_model, monkeypatch, owner, name, family):
    """A function in C gives a tenth too much; linear layers hide that in bfloat16's rounding."""
    right = getattr(owner, name)

    def off(*arguments, **named):
        result = right(*arguments, **named)
        return result * 1.1 if torch.is_tensor(result) else (*result[:-1], result[-1] * 1.1)

    monkeypatch.setattr(owner, name, off)
    dtype = "float32" if owner is DeltaFunctions else "bfloat16"
    with pytest.raises(ConfigError, match=r"--compile on, .* differs from the ref"):
        Scorer(str(tiny_model(family)[0]), compile="on", dtype=dtype).close()


def test_auto_leaves_small_models_alone(tiny_model):
    assert not plan_backend(tiny_model()[0], ModelConfig()).compile
    assert compiler.use_compiler("auto", CPU, torch.float32, ALL)
    assert not compiler.use_compiler("auto", CPU, torch.float32, 999_999)
    assert not compiler.use_compiler("off", CPU, torch.float32, ALL)
    assert compiler.use_compiler("on", CPU, torch.float32, 1)


def test_without_a_compiler(monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert not compiler.use_compiler("auto", CPU, torch.float32, ALL)
    assert [record.message for record in caplog.records] == [
        "attention and element-wise work run in plain torch, slowly: there is no C compiler "
        "no-such-compiler; install gcc"
    ]
    with pytest.raises(ConfigError, match="--compile on: there is no C"):
        compiler.use_compiler("on", CPU, torch.float32, ALL)


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    """Return a folder with what an image has, compiled for every level of CPUs."""
    folder = tmp_path_factory.mktemp("ahead")
    assert len(build_ahead("gcc", folder)) == len(LEVELS) * len(FORMATS)
    return folder


def test_an_image_needs_no_compiler(tiny_model, monkeypatch, ahead, caplog):
    """The library for this CPU gives the same scores as one that is compiled here."""
    directory, _ = tiny_model("qwen3")
    rng = np.random.default_rng(4)
    query, items = random_ids(rng, 30), [random_ids(rng, n) for n in (3, 9, 1, 20)]
    logprobs = []
    for compiled in (False, True):
        if compiled:
            monkeypatch.setenv("CC", "no-such-compiler")
            for module in (compiler, rows_in_c, doctor):
                monkeypatch.setattr(module, "find_prebuilt", partial(find_prebuilt, folder=ahead))
            assert compiler.use_compiler("auto", CPU, torch.float32, ALL)
            found = doctor.examine(ModelConfig(device="cpu"), ServerConfig(port=0))
            assert ("C compiler", "OK") in [(check.name, check.level) for check in found]
        with Scorer(str(directory), compile="on", dtype="float32") as scorer:
            result = scorer.score(query, items, label_token_ids=LABELS, logprobs=True)
            logprobs.append(result.logprobs)
    np.testing.assert_allclose(logprobs[0], logprobs[1], atol=1e-6, rtol=0)
    assert "slowly" not in caplog.text


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_cpu_chooses_its_level(ahead, dtype):
    has = dict.fromkeys((name for names in LEVELS.values() for name in names), True)
    asked = {
        "x86-64-v4+avx512bf16": has,
        "x86-64-v4": has | {"avx512_bf16": False},
        "x86-64-v3": has | {"avx512_vl": False},
    }
    for level, features in asked.items():
        library = find_prebuilt(dtype, ahead, features)
        assert f"-{level}-" in library.name
        if all(torch.cpu.get_capabilities().get(name) for name in LEVELS[level]):
            load(library)
    for old in ({}, has | {"fma3": False}):
        assert find_prebuilt(dtype, ahead, old) is None


def test_libraries_of_other_sources_are_never_taken(ahead, monkeypatch):
    assert find_prebuilt(torch.float32, ahead) is not None
    module = sys.modules[find_prebuilt.__module__]
    monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, "-DOTHER"))
    assert find_prebuilt(torch.float32, ahead) is None


def test_what_is_not_compiled(caplog):
    cuda = torch.device("cuda")
    assert not compiler.use_compiler("auto", cuda, torch.bfloat16, ALL)
    assert not caplog.records
    with pytest.raises(ConfigError, match="device is cuda; supported: cpu"):
        compiler.use_compiler("on", cuda, torch.bfloat16, ALL)


def test_a_compiler_that_fails(tiny_model, monkeypatch, tmp_path):
    failing = tmp_path / "old-gcc"
    failing.write_text("#!/bin/sh\necho no headers >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CC", str(failing))
    with (
        pytest.raises(ConfigError, match="old-gcc failed .*: no headers\n; choose --compile off"),
        Scorer(str(tiny_model("qwen3")[0]), compile="on"),
    ):
        pass


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
