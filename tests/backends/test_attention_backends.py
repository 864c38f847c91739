"""Promise: `--attention` picks a backend that can run or refuses with the reason; a backend whose
known answer is wrong is refused at start; `two-pass` scores as torch does."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpuscore import Scorer
from gpuscore.backends import plan_backend
from gpuscore.backends.common import known_batch
from gpuscore.backends.torch import known_answer
from gpuscore.backends.torch.attention import choice
from gpuscore.backends.torch.attention.choice import attention_factory, choose_attention
from gpuscore.backends.torch.attention.operators import TorchAttention
from gpuscore.backends.torch.attention.two_pass import TwoPassAttention, choose_dense
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.types.batch import visible_rows
from gpuscore_kernels.extend_attention.config import CONFIGS, config_for, config_of
from gpuscore_kernels.partial_attention import merge_partials, partial_attention
from support.models import random_ids

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
        ("two-pass", "gemma2", {}, "neither sliding windows nor soft-caps"),
        ("two-pass", "qwen3", {"dtype": torch.float32}, "do not support float32"),
        ("two-pass", "qwen3", {"deterministic": True}, "not supported with --deterministic"),
        ("flashinfer", "qwen3", {"device": CPU}, "device is cpu"),
        ("flashinfer", "qwen3", {"dtype": torch.float32}, "do not support float32"),
        ("flashinfer", "gemma3", {}, "sliding windows"),
        ("flashinfer-cascade", "qwen3", {"head_dim": 80}, "supported: 64, 128, 256"),
    ],
)
def test_a_choice_that_cannot_run(
    model, monkeypatch, no_interpreter, wanted, family, options, reason
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
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
    assert config_for(CPU, 7, torch.float32).keys == 16
    with pytest.raises(ValueError, match=r"7\.5; supported: 8\.0"):
        config_of(75, 64, 2)
    with pytest.raises(ValueError, match="head_dim is 257"):
        config_of(80, 257, 2)
    for (arch, itemsize), row in CONFIGS.items():
        for dim, config in row.items():
            large = dim == 256 and arch in (89, 90, 120)  # what fits with three stages is slower
            assert (config.num_stages >= 3) == (itemsize == 2 and not large)
            assert config.carry_slot == (itemsize == 2)
            assert config.steady().shape(3).own == config.keys
            assert 64 % config.keys == 0  # pages on CUDA
            assert config.keys % config.own == 0


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3"])
def test_two_passes_score_as_torch(tiny_model, no_interpreter, family):
    directory, _ = tiny_model(family)
    rng = np.random.default_rng(0)
    query, items = random_ids(rng, 75), [random_ids(rng, n) for n in (3, 9, 1, 20, 33)]
    scores = []
    for attention in ("torch", "two-pass"):
        with Scorer(str(directory), attention=attention, max_batch_tokens=64) as scorer:
            result = scorer.score(query, items, label_token_ids=[3, 17], logprobs=True)
            scores.append(result.logprobs)
    np.testing.assert_allclose(*scores, atol=2e-5, rtol=0)


def test_two_passes_build_no_plan_per_shape(model, monkeypatch):
    """On Hopper, where torch would choose cuDNN; without CUDA, on tensors without memory."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    called = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(str(function))
            return function(*args, **(kwargs or {}))

    dense = choose_dense(torch.device("cuda"))
    with FakeTensorMode(), Noting():
        q, k = (torch.empty(1, heads, 50, 64, device="cuda").half() for heads in (4, 2))
        out, lse = partial_attention(q, k, k, scale=0.1, impl=dense)
    assert (out.shape, lse.shape) == ((1, 4, 50, 64), (1, 4, 50))
    attention = [name for name in called if "attention" in name or "cudnn" in name]
    assert attention == ["aten._scaled_dot_product_flash_attention.default"]


def check(model, factory, page_size=16):
    known_answer.check_known_answer("x", factory, model, torch.float32, CPU, page_size)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_right_answer(model, family, page_size):
    for name in ("torch", "two-pass"):
        read = model(family)
        factory = attention_factory(name, read, CPU, torch.float32, merge_partials, None)
        check(read, factory, page_size)


def overlooks(field, value):
    """Make a backend that reads every value of a batch's field as `value`."""

    def factory(config, pool):
        backend = TwoPassAttention(config, pool, "cpu")
        prepare = backend.prepare

        def blind(batch):
            return prepare(replace(batch, **{field: np.full_like(getattr(batch, field), value)}))

        backend.prepare = blind
        return backend

    return factory


def with_config(**changes):
    return lambda config, pool: TorchAttention(
        replace(config, **changes), pool, "cpu", merge_partials
    )


@pytest.mark.parametrize(
    ("family", "factory"),
    [
        ("qwen3", overlooks("parent", -1)),
        ("qwen3", overlooks("page_table", 0)),
        ("qwen3", with_config(attention_scale=0.3)),
        ("gemma2", with_config(attention_softcap=None)),
        ("gemma2", with_config(windows=(21, None, 20))),
        ("gemma3", with_config(windows=(None, None, None))),
    ],
)
def test_a_wrong_answer_is_seen(model, family, factory):
    with pytest.raises(ConfigError, match="--attention x computes something else"):
        check(model(family), factory)


def blind_to_parents(batch):
    return visible_rows(replace(batch, parent=np.full_like(batch.parent, -1)))


def not_causal(batch):
    seen = visible_rows(batch)
    return seen | seen.T


@pytest.mark.parametrize("rule", [blind_to_parents, not_causal])
def test_backends_are_held_to_the_rule_itself(model, monkeypatch, rule):
    monkeypatch.setattr(known_batch, "visible_rows", rule)
    read = model("qwen3")
    factory = attention_factory("torch", read, CPU, torch.float32, merge_partials, None)
    with pytest.raises(ConfigError, match="--attention x computes something else"):
        check(read, factory)


def test_a_library_that_knows_no_mask_refuses_it():
    q, k, v = (torch.zeros(1, 2, 5, 8) for _ in range(3))
    for option in ({"causal": True}, {"softcap": 1.0}, {"first_key": torch.zeros(5).long()}):
        with pytest.raises(ValueError, match="neither masks nor soft-caps"):
            partial_attention(q, k, v, scale=1.0, impl="flash", **option)
