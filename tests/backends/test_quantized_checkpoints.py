"""Promise: quantised checkpoints are scored as the library that made them computes them, and every
tensor and key of them is read or refused.

The checkpoints of tests/fixtures/quantized, and what compressed-tensors answered, come from `make
fixtures`.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpuscore import Scorer
from gpuscore.backends import plan_backend
from gpuscore.backends.common.hf_config import RawConfig
from gpuscore.backends.common.quantization import ON_CPUS, choose_precision, read_storage
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.linear import why_not_int8
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.types.batch import NO_TOKENS, Prefix, Segment, pack
from support.eight_bits import needs_int8
from support.quantized import FOLDER, NAMES, recorded
from support.slow import slow

INT8 = [name for name in NAMES if "int8" in name]
# In log p. An activation that is rounded the other way costs 0.05 and more in models this small.
CLOSE = 1e-4


def logprobs(backend, prompts, vocabulary=400):
    """Score whole prompts, packed, for every token."""
    labels = np.arange(vocabulary, dtype=np.int32)
    segments = [
        Segment(prompt, 0, index, label_ids=labels, need_lse=True)
        for index, prompt in enumerate(prompts)
    ]
    batch = pack(segments, [Prefix(0, NO_TOKENS)] * len(prompts))
    scores = backend.collect(backend.extend(batch))
    return scores.label_logits.reshape(len(prompts), -1) - scores.lse[:, None]


def but_one(differences):
    """Return the largest difference [prompts, labels] of all prompts but the worst.

    The last bit of an activation may decide how it is rounded, in some prompt.
    """
    return np.sort(np.abs(differences).max(axis=1))[-2]


def of_torch(directory, prompts, **options):
    plan = plan_backend(Path(directory), ModelConfig(device="cpu", dtype="float32", **options))
    backend = TorchBackend(plan)
    try:
        return logprobs(backend, prompts)
    finally:
        backend.close()


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_library(name):
    expected = recorded(name)
    prompts = expected.prompts
    got = of_torch(FOLDER / name, prompts, quantization="w8a16")
    assert np.abs(got - expected.w8a16).max() <= CLOSE


@needs_int8
@pytest.mark.parametrize("name", INT8)
def test_activations_in_int8_are_those_of_the_library(name):
    expected = recorded(name)
    prompts = expected.prompts
    got = of_torch(FOLDER / name, prompts)
    assert but_one(got - expected.w8a8) <= CLOSE
    assert but_one(got - expected.w8a16) > 100 * CLOSE  # they are quantised


@pytest.mark.parametrize("name", slow("qwen3-int8", "qwen3-fp8-block", "qwen3-fp8-channel"))
def test_jax_computes_the_same(name):
    pytest.importorskip("jax")
    expected = recorded(name)
    prompts = expected.prompts
    with Scorer(str(FOLDER / name), backend="jax", device="cpu", dtype="float32") as scorer:
        got = [
            scorer.score(
                prompt[:-1].tolist(),
                [prompt[-1:].tolist()],
                label_token_ids=list(range(400)),
                logprobs=True,
            ).logprobs[0]
            for prompt in prompts[:4]
        ]
    kind = "w8a8" if "int8" in name else "w8a16"
    assert but_one(np.stack(got) - getattr(expected, kind)[:4]) <= CLOSE


@needs_int8
def test_packed_is_alone():
    """Rows of batches of one shape are equal bit for bit; at other shapes they are close."""
    prompts = recorded("qwen3-int8").prompts
    again = [prompts[3]] * 4
    together = of_torch(FOLDER / "qwen3-int8", again)
    assert all(np.array_equal(row, together[0]) for row in together)
    plan = plan_backend(FOLDER / "qwen3-int8", ModelConfig(device="cpu", dtype="float32"))
    backend = TorchBackend(plan)
    try:
        alone = np.concatenate([logprobs(backend, [prompt]) for prompt in prompts])
        assert np.abs(logprobs(backend, prompts) - alone).max() <= 2e-5
    finally:
        backend.close()


def test_a_cpu_without_exact_sums_is_refused(monkeypatch):
    monkeypatch.setattr("gpuscore.backends.torch.linear.exact_on_this_cpu", lambda: False)
    with pytest.raises(ConfigError, match="neither VNNI nor AMX"):
        plan_backend(FOLDER / "qwen3-int8", ModelConfig(device="cpu"))


def test_int8_on_cuda_is_refused_with_what_is_supported():
    assert why_not_int8(torch.device("cuda")) == ON_CPUS
    storage = read_storage(RawConfig.read(FOLDER / "qwen3-int8").fields)
    with pytest.raises(ConfigError, match="INT8 on CPUs only; supported: w8a16"):
        choose_precision("auto", storage, lambda: ON_CPUS)
    assert choose_precision("w8a16", storage, lambda: ON_CPUS) == "w8a16"


@pytest.fixture
def copy(tmp_path):
    def make(name):
        return Path(shutil.copytree(FOLDER / name, tmp_path / name))

    return make


def changed(section, path, value):
    """Set a value, given a path such as ("config_groups", "group_0", "targets")."""
    *parents, last = path
    for key in parents:
        section = section[key]
    section[last] = value


GROUP = ("config_groups", "group_0")
INPUT, WEIGHTS = (*GROUP, "input_activations"), (*GROUP, "weights")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("quant_method",),
            "awq",
            "quant_method is 'awq'; supported: .*serve the model that was quantised",
        ),
        (("quant_method",), "gptq", "quant_method is 'gptq'"),
        (("quant_method",), "bitsandbytes", "quant_method is 'bitsandbytes'"),
        (("format",), "pack-quantized", "format is 'pack-quantized'; supported: int-quantized"),
        (("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme is .*; supported: None"),
        (("transform_config",), {"config_groups": {"R1": {}}}, "transform_config is"),
        (("sparsity_config",), {"format": "sparse"}, "sparsity_config is"),
        (("surprise",), 1, "surprise is 1; supported: no such key"),
        (("config_groups",), {}, "config_groups is {}; supported: one group"),
        ((*GROUP, "targets"), ["re:.*q_proj"], "targets is .*; supported: \\['Linear'\\]"),
        ((*GROUP, "output_activations"), {"num_bits": 8}, "output_activations is"),
        ((*WEIGHTS, "num_bits"), 4, "weights.num_bits is 4; supported: 8"),
        ((*WEIGHTS, "symmetric"), False, "weights.symmetric is False; supported: True"),
        ((*WEIGHTS, "strategy"), "group", "weights is 'int per group'; supported: int per channel"),
        ((*WEIGHTS, "dynamic"), True, "weights.dynamic is True; supported: false"),
        ((*INPUT, "symmetric"), False, "input_activations.symmetric is False"),
        ((*INPUT, "strategy"), "tensor", "a dynamic scale per tensor.*other callers' requests"),
        ((*INPUT, "dynamic"), False, "input_activations is 'static per token'"),
        ((*INPUT, "type"), "float", "type is 'float'; supported: the type of the weights"),
        ((*INPUT, "surprise"), 1, "input_activations.surprise is 1; supported: no such key"),
    ],
)
def test_other_formats_are_refused_by_name(copy, path, value, message):
    directory = copy("qwen3-int8")
    config = json.loads((directory / "config.json").read_text())
    changed(config["quantization_config"], path, value)
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        plan_backend(directory, ModelConfig(device="cpu"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("activation_scheme", "static", "activation_scheme is 'static'; supported: dynamic"),
        ("weight_block_size", [64, 64], "weight_block_size is \\[64, 64\\]"),
        ("weight_block_size", None, "weight_block_size is None"),
        ("scale_fmt", "ue8m0", "scale_fmt is 'ue8m0'; supported: float"),
        ("expert_dtype", "fp4", "expert_dtype is 'fp4'"),
        ("modules_to_convert", ["embed"], "modules_to_convert is"),
        ("surprise", 1, "surprise is 1; supported: no such key"),
    ],
)
def test_other_blocks_are_refused_by_name(copy, key, value, message):
    directory = copy("qwen3-fp8-block-transformers")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"][key] = value
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        plan_backend(directory, ModelConfig(device="cpu"))


Q = "model.layers.0.self_attn.q_proj."


def infinite(tensors):
    tensors[Q + "weight_scale"][0] = torch.inf


def wrong_shape(tensors):
    tensors[Q + "weight_scale"] = tensors[Q + "weight_scale"][:-1].clone()


def whole_scale(tensors):
    tensors[Q + "weight_scale"] = torch.ones(128, 1, dtype=torch.int32)


def zero_point(tensors):
    tensors[Q + "weight_zero_point"] = torch.zeros(128, 1, dtype=torch.int8)


def lost_scale(tensors):
    del tensors[Q + "weight_scale"]


def wide(tensors):
    tensors[Q + "weight"] = tensors[Q + "weight"].to(torch.int32)


def no_scales(tensors):
    for name in [name for name in tensors if name.endswith("_scale")]:
        del tensors[name]
        weight = name.removesuffix("_scale")
        tensors[weight] = tensors[weight].to(torch.bfloat16)


@needs_int8
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (infinite, "q_proj.weight holds NaN or infinity"),
        (wrong_shape, "q_proj.weight_scale is BF16 .*; supported: .* of shape"),
        (whole_scale, "q_proj.weight_scale is I32"),
        (zero_point, "holds 1 tensors that .* does not use, .*weight_zero_point"),
        (lost_scale, "q_proj.weight is I8; supported: bfloat16"),
        (wide, "q_proj.weight is I32 and has a scale, .*; config.json asks for I8"),
        (no_scales, "no weight of a linear layer has a scale"),
    ],
)
def test_damaged_tensors_are_refused(copy, change, message):
    directory = copy("qwen3-int8")
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        TorchBackend(plan_backend(directory, ModelConfig(device="cpu")))


@needs_int8
def test_a_layer_that_was_left_out_is_computed_as_it_is(copy):
    """A layer under `ignore` of compressed-tensors has no scale, and its rows are not rounded."""
    directory, expected = copy("qwen3-int8"), recorded("qwen3-int8")
    tensors = load_file(directory / "model.safetensors")
    scale = tensors.pop(Q + "weight_scale").float()
    tensors[Q + "weight"] = tensors[Q + "weight"].float() * scale
    save_file(tensors, directory / "model.safetensors")
    got = of_torch(directory, expected.prompts)
    kinds = [np.abs(got - getattr(expected, kind)).max() for kind in ("w8a8", "w8a16")]
    assert min(kinds) > 100 * CLOSE
