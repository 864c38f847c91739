"""Promise: a quantised checkpoint with scales of another layer is refused; others are served."""

import json
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from gpuscore import Scorer
from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.hf_config import RawConfig
from gpuscore.backends.torch.scales import check_scales
from gpuscore.errors import ConfigError
from gpuscore.models.hub import model_directory
from support.backends import needs_jax
from support.models import make_model
from support.quantized import FOLDER, NAMES, quantised

PARTS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


def check(directory, allow=False):
    check_scales(directory, read_architecture(RawConfig.read(directory)), allow)


def name_of(layer, part):
    return f"model.layers.{layer}.{part}.weight_scale"


@pytest.fixture
def changed(tmp_path):
    """A function that quantises the demo and changes its tensors."""

    def make(change, kind="int8"):
        directory = quantised(model_directory("demo"), tmp_path / "demo", kind)
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    return make


def swapped(part, first=0, second=2):
    """Return a change by which two layers' scales of a part change places."""

    def change(tensors):
        one, other = name_of(first, part), name_of(second, part)
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("part", PARTS)
def test_scales_of_another_layer_are_refused(changed, part, kind):
    directory = changed(swapped(part), kind)
    with pytest.raises(ConfigError, match=rf"layers\.[02]\.{part}.*layers\.[02]\.{part}"):
        check(directory)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_scales_in_their_places_are_accepted(changed, kind):
    check(changed(lambda tensors: None, kind))


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_of_the_libraries_are_accepted(name):
    check(FOLDER / name)


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=needs_jax)])
def test_such_a_checkpoint_is_not_served(changed, backend, caplog):
    directory = changed(swapped("mlp.down_proj"))
    options = {"device": "cpu", "backend": backend, "quantization": "w8a16"}
    options |= {"max_batch_tokens": 64}
    with pytest.raises(ConfigError, match="fit the scales of .*--allow-degenerate"):
        Scorer(str(directory), **options)
    with Scorer(str(directory), allow_degenerate=True, **options):
        assert "(--allow-degenerate)" in caplog.text


def test_rows_of_zeros_and_equal_scales_tell_nothing(changed):
    def change(tensors):
        for layer in (0, 2):
            tensors[name_of(layer, "mlp.up_proj")].fill_(0.01)
            tensors[name_of(layer, "mlp.down_proj").removesuffix("_scale")][3:40] = 0

    check(changed(change))


@pytest.mark.parametrize("wrong", [False, True])
def test_scales_per_block_are_compared(tmp_path, wrong):
    """A matrix has 8 x 8 blocks, the last of which are cut."""
    config = {"hidden_size": 900, "intermediate_size": 1000, "num_hidden_layers": 2}
    make_model(tmp_path, head_dim=16, **config)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if "mlp" in name]:
        weight = tensors[name].float()
        scale = functional.max_pool2d(weight.abs()[None], 128, ceil_mode=True)[0] / 448
        every = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        stored = weight / every[: weight.shape[0], : weight.shape[1]]
        tensors |= {name: stored.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    if wrong:
        one, other = (f"model.layers.{layer}.mlp.up_proj.weight_scale_inv" for layer in (0, 1))
        tensors[one], tensors[other] = tensors[other], tensors[one]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    section = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    fields["quantization_config"] = section | {"weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="up_proj") if wrong else nullcontext():
        check(tmp_path)
