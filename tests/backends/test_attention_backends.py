"""Promise: `--attention` picks a backend that can run or refuses with the reason; a backend whose
known answer is wrong is refused at start."""

from dataclasses import replace

import pytest
import torch

from gpuscore.backends import plan_backend
from gpuscore.backends.torch.attention import choice
from gpuscore.backends.torch.attention.choice import choose_attention
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore_kernels.extend_attention.config import CONFIGS, config_for, config_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def model(tiny_model):
    """A function that returns the configuration of a family's tiny model."""

    def read(family="qwen3"):
        directory, _ = tiny_model(family)
        return plan_backend(directory, ModelConfig(str(directory))).architecture.config

    return read


@pytest.fixture
def no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_auto(model, monkeypatch, caplog):
    def choose(device, deterministic=False):
        return choose_attention("auto", model(), device, torch.bfloat16, deterministic)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: name)
    assert choose(CPU) == "torch"
    assert choose(CUDA) == "triton"
    assert choose(CUDA, deterministic=True) == "triton"
    assert not caplog.records
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose(CUDA) == "torch"
    assert "compute capability is 7.5" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "family", "options", "reason"),
    [
        ("triton", "qwen3", {"device": CPU}, "device is cpu; supported: cuda"),
        ("triton", "qwen3", {"head_dim": 320}, "head_dim is 320; supported: at most 256"),
        ("triton", "qwen3", {"num_heads": 512}, "256 query heads share a KV head"),
        ("flashinfer", "qwen3", {"deterministic": True}, "not supported with --deterministic"),
        ("flashinfer", "qwen3", {"device": CPU}, "device is cpu"),
        ("flashinfer", "qwen3", {"dtype": torch.float32}, "do not support float32"),
        ("flashinfer", "gemma3", {}, "sliding windows"),
        ("fa4", "qwen3", {"deterministic": True}, "not supported with --deterministic"),
        ("fa4", "qwen3", {"device": CPU}, "device is cpu"),
        ("fa4", "qwen3", {"capability": (10, 0)}, "for GPUs of compute capability 9.0"),
        ("fa4", "qwen3", {"dtype": torch.float16}, "dtype is float16; supported: bfloat16"),
        ("fa4", "gemma3", {}, "sliding windows"),
        ("fa4", "qwen3", {"head_dim": 256}, "head_dim is 256"),
        ("fa4", "qwen3", {"head_dim": 64, "num_heads": 14}, "7 heads share a KV head"),
    ],
)
def test_a_choice_that_cannot_run(
    model, monkeypatch, no_interpreter, wanted, family, options, reason
):
    capability = options.get("capability", (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: name)
    fields = {key: options[key] for key in ("head_dim", "num_heads") if key in options}
    with pytest.raises(ConfigError, match=rf"^--attention {wanted}: .*{reason}"):
        choose_attention(
            wanted,
            replace(model(family), **fields),
            options.get("device", CUDA),
            options.get("dtype", torch.bfloat16),
            options.get("deterministic", False),
        )


@pytest.mark.parametrize(("wanted", "package"), [("triton", "triton"), ("flashinfer", "Flash")])
def test_without_the_package(model, monkeypatch, wanted, package):
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"{package}.* is not installed"):
        choose_attention(wanted, model(), CUDA, torch.bfloat16, False)


def test_the_interpreter_computes_no_bfloat16(model, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: name)
    assert choose_attention("triton", model(), CPU, torch.float16, False) == "triton"
    with pytest.raises(ConfigError, match="interpreter computes bfloat16 wrongly"):
        choose_attention("triton", model(), CPU, torch.bfloat16, False)


def test_launch_configurations():
    assert config_of(90, 100, 2) is CONFIGS[90, 2][128]
    assert config_of(103, 64, 2) is CONFIGS[90, 2][64]  # 103 is unknown and gets the row of 90
    assert config_for(CPU, 7, torch.float32).block_n == 16
    with pytest.raises(ValueError, match=r"7\.5; supported: 8\.0"):
        config_of(75, 64, 2)
    with pytest.raises(ValueError, match="head_dim is 257"):
        config_of(80, 257, 2)
    for (arch, itemsize), row in CONFIGS.items():
        for dim, config in row.items():
            large = dim == 256 and arch in (89, 90, 120)  # what fits with three stages is slower
            assert (config.num_stages >= 3) == (itemsize == 2 and not large)
            assert config.steady().shape(3).masked_keys == config.block_n
            assert 64 % config.block_n == 0  # pages on CUDA
            assert config.block_n % config.masked_n == 0
