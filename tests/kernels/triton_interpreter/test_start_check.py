"""Promise: Triton's kernels pass the check at start, which refuses one that computes too much."""

import importlib

import pytest
import torch

from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.common import start_check
from gpuscore.backends.common.start_check import Tree
from gpuscore.backends.torch import backend
from gpuscore.errors import ConfigError
from support.kernels import INTERPRETED, in_triton
from support.slow import slow

FEW = Tree((3, 1, 4, 1), (-1, 0, 0, 2)), Tree((5, 2), (-1, 0))


@pytest.fixture
def start(tiny_model, monkeypatch):
    """start(family) loads a model; in the interpreter with a check of fewer rows."""
    if INTERPRETED:
        for name in ("warmup_batches", "largest_batches", "largest_in_parts"):
            monkeypatch.setattr(backend, name, lambda *a, **how: iter(()))
        monkeypatch.setattr(backend, "TREES", FEW)
        monkeypatch.setattr(start_check, "CHUNK", 3)

    def run(family, dtype="float32", layers=2):
        kinds = (
            {"layer_types": ["linear_attention", "full_attention"]} if family == "qwen3_5" else {}
        )
        directory, _ = tiny_model(family, num_hidden_layers=layers, **kinds)
        config = in_triton(directory, dtype=dtype, cuda_graph_tokens=0)
        create_backend(plan_backend(directory, config)).close()

    return run


DTYPES = ["float32", *slow("float16")] + ([] if INTERPRETED else ["bfloat16"])
FAMILIES = ["qwen3", *slow("gemma2", "qwen3_moe")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_right_kernels_are_accepted(start, family, dtype):
    if (family, dtype) != ("gemma2", "float16"):  # in which it overflows
        start(family, dtype)


@pytest.mark.parametrize(
    ("folder", "name", "family"),
    [
        ("label_head", "vocab_statistics", "qwen3"),
        ("extend_attention", "extend_attention", "qwen3"),
        *slow(
            ("qk_norm_rope_store", "qk_norm_rope_store", "qwen3"),
            ("add_rms_norm", "add_rms_norm", "qwen3"),
            ("gated", "gated", "qwen3"),
            ("delta_net", "delta_rule", "qwen3_5"),
            ("delta_net", "gated_norm", "qwen3_5"),
        ),
    ],
)
def test_a_hundredth_too_much_is_refused(start, monkeypatch, folder, name, family):
    module = importlib.import_module(f"gpuscore_kernels.{folder}.triton")
    right = getattr(module, name)

    def off(*arguments, **named):
        result = right(*arguments, **named)
        return result * 1.01 if torch.is_tensor(result) else (result[0] * 1.01, *result[1:])

    monkeypatch.setattr(module, name, off)
    with pytest.raises(ConfigError, match=r"--attention triton with --kernels triton differs from"):
        start(family, layers=2 if family == "qwen3_5" else 1)
