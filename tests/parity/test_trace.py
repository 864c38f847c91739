"""Promise: `parity trace` names the layer in which a backend goes wrong, and none without."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpuscore.backends.torch import loader
from gpuscore.commands.cli import main
from gpuscore.errors import ConfigError
from gpuscore.measure.parity.models import INDEX, CutModels
from support.slow import slow

LAYERS = 4


def trace(directory, *flags):
    words = ["--device", "cpu", "--max-batch-tokens", "128"]
    return main(["parity", "trace", str(directory), *words, *flags])


def wrong_layer(monkeypatch, index, factor):
    """Plant a defect: the norm before one layer's products has other weights."""
    read = loader.Checkpoint.layer

    def wrong(self, layer):
        weights = read(self, layer)
        norm = weights.input_norm * (factor if layer == index else 1)
        return dataclasses.replace(weights, input_norm=norm)

    monkeypatch.setattr(loader.Checkpoint, "layer", wrong)


@pytest.mark.parametrize(
    ("dtype", "layer", "factor"),
    [("float32", 2, 1.01), *slow(("float32", 0, 1.01), ("bfloat16", 1, 1.5))],
)
def test_the_layer_with_a_defect_is_named(tiny_model, monkeypatch, capsys, dtype, layer, factor):
    directory, _ = tiny_model("llama", num_hidden_layers=LAYERS)
    wrong_layer(monkeypatch, layer, factor)
    assert trace(directory, "--dtype", dtype, "--threads", "1") == 1
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == f"layer {layer} is the first one whose error is too large"
    assert [line.split()[0] for line in shown.splitlines()[2:-1]] == [
        str(number) for number in range(layer + 1)
    ]


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama", ("--dtype", "float32", "--threads", "1")),
        *slow(
            ("llama", ("--dtype", "bfloat16", "--threads", "1")),
            ("gemma3", ("--dtype", "float32", "--threads", "1")),
            ("qwen3_moe", ("--dtype", "float32", "--threads", "1")),
            ("qwen3", ("--dtype", "float32", "--backend", "jax")),
        ),
    ],
)
def test_no_layer_is_named_without_a_defect(tiny_model, capsys, family, flags):
    directory, _ = tiny_model(family)
    assert trace(directory, *flags) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "no layer has an error that is too large"
    config = json.loads((directory / "config.json").read_text())
    assert len(shown.splitlines()) == config["num_hidden_layers"] + 3


class TestCutModels:
    """Models without their last layers."""

    @pytest.fixture
    def sharded(self, tiny_model, tmp_path):
        """A checkpoint in two files, with the tensors of a layer in both."""
        directory, _ = tiny_model("llama", num_hidden_layers=LAYERS)
        tensors, copy = load_file(directory / "model.safetensors"), tmp_path / "sharded"
        copy.mkdir()
        weight_map = {name: f"{place % 2}.safetensors" for place, name in enumerate(tensors)}
        for file in set(weight_map.values()):
            part = {name: tensors[name] for name in tensors if weight_map[name] == file}
            save_file(part, copy / file)
        (copy / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        (copy / "config.json").write_bytes((directory / "config.json").read_bytes())
        return copy, tensors

    def test_they_have_the_same_tensors_bit_by_bit(self, sharded, tmp_path):
        directory, tensors = sharded
        (tmp_path / "cut").mkdir()
        models = CutModels(directory, tmp_path / "cut")
        assert models.layers == LAYERS
        for layers in (1, 3):
            made = models.of(layers)
            names = json.loads((made / INDEX).read_text())["weight_map"]
            expected = {
                name
                for name in tensors
                if "layers." not in name or int(name.split("layers.")[1].split(".")[0]) < layers
            }
            assert set(names) == expected
            for name, file in names.items():
                tensor = load_file(made / file)[name]
                assert tensor.dtype == tensors[name].dtype
                assert torch.equal(tensor, tensors[name])

    def test_lists_of_layers_in_the_configuration_are_cut(self, tiny_model, tmp_path):
        directory, _ = tiny_model("gemma3")
        config = json.loads((directory / "config.json").read_text())
        made = CutModels(directory, tmp_path).of(1)
        cut = json.loads((made / "config.json").read_text())
        assert cut["num_hidden_layers"] == 1
        assert cut["layer_types"] == config["layer_types"][:1]
        assert cut["architectures"] == config["architectures"]

    def test_a_model_without_layers(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ConfigError, match="num_hidden_layers is None"):
            CutModels(tmp_path, tmp_path)


def test_models_that_cannot_be_traced(tiny_model, capsys):
    quantised = Path(__file__).parents[1] / "fixtures" / "quantized" / "qwen3-fp8-channel"
    for directory, message in (
        (tiny_model("qwen2_classes")[0], "language models, whose labels are tokens"),
        (quantised, "linear layers are in w8a16; supported"),
    ):
        assert trace(directory) == 78
        assert message in capsys.readouterr().err
