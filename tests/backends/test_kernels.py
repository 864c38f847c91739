"""Promise: an explicit `--kernels` that cannot run is an error with the reason."""

import logging

import pytest
import torch

from gpuscore.backends.torch import kernels
from gpuscore.backends.torch.kernels import in_triton, use_kernels
from gpuscore.errors import ConfigError
from gpuscore_kernels.reference import rotate

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_cpu_has_torch_unless_asked(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not use_kernels("auto", CPU, torch.float32)
    assert not use_kernels("torch", CPU, torch.float32)
    with pytest.raises(ConfigError, match="--kernels triton: (device is cpu|triton is not inst)"):
        use_kernels("triton", CPU, torch.float32)


def test_the_interpreter_does_not_get_bfloat16(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert use_kernels("triton", CPU, torch.float16)
    with pytest.raises(ConfigError, match="computes bfloat16 wrongly"):
        use_kernels("triton", CPU, torch.bfloat16)


def test_a_gpu_without_triton_says_so(monkeypatch, caplog):
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert not use_kernels("auto", CUDA, torch.bfloat16)
    assert "triton is not installed" in caplog.text
    assert not use_kernels("torch", CUDA, torch.bfloat16)
    with pytest.raises(ConfigError, match="triton is not installed here"):
        use_kernels("triton", CUDA, torch.bfloat16)


def test_what_has_no_kernel_stays():
    assert in_triton(rotate) is rotate
