"""Promise: a model of another format or kind is refused with what it is and what to do."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    CLIPConfig,
    Gemma3Config,
    ModernBertConfig,
    Qwen2VLConfig,
    Qwen3Config,
    T5Config,
    XLMRobertaConfig,
)

from gpuscore.backends import plan_backend
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.models.hub import model_directory
from support.models import make_model


def refusal(path) -> str:
    with pytest.raises(ConfigError) as error:
        model_directory(str(path))
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        (XLMRobertaConfig, "XLMRobertaForSequenceClassification"),
        (ModernBertConfig, "ModernBertForMaskedLM"),
        (T5Config, "T5ForConditionalGeneration"),
        (CLIPConfig, "CLIPModel"),
        (Gemma3Config, "Gemma3ForConditionalGeneration"),
        (Qwen2VLConfig, "Qwen2VLForConditionalGeneration"),
        (Qwen3Config, "Qwen3Model"),
    ],
)
def test_another_kind_of_model(tmp_path, kind, architecture):
    """The configurations are those that transformers writes."""
    kind(architectures=[architecture]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"is \\['{architecture}'\\].*; supported: .*Qwen3For"):
        plan_backend(model_directory(str(tmp_path)), ModelConfig())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model-00001-of-00002.bin", "pickled by torch; AutoModelForCausalLM.from_pretr"),
        ("model-Q4_K_M.gguf", "in llama.cpp's format GGUF; load the model's safetensors, because"),
        ("consolidated.00.pth", "in the format of the model's authors"),
        ("model.onnx", "in ONNX"),
        ("onnx/model.onnx", "in ONNX"),
        ("tf_model.h5", "in TensorFlow's format"),
        ("flax_model.msgpack", "in Flax's format"),
    ],
)
def test_weights_in_another_format(tmp_path, name, words):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    for refused in (path, tmp_path):
        assert f"{'is' if refused == path else f'has {path.name}, which is'} {words}" in (
            refusal(refused)
        )
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert model_directory(str(tmp_path)) == tmp_path, "safetensors are there, too"


@pytest.mark.parametrize("name", ["model.safetensors", "m.zip"])
def test_a_file_in_place_of_a_directory(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    assert f"is one file; give a model's directory: {tmp_path}?" in refusal(tmp_path / name)


@pytest.mark.parametrize("whole_weights", [False, True])
def test_an_adapter(tmp_path, whole_weights):
    """Beside whole weights too: transformers loads the base model then, not these weights."""
    if whole_weights:
        make_model(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert ": serve its base model with --adapter" in refusal(tmp_path)


def test_the_lines_convert_pickled_weights(tmp_path, monkeypatch):
    """The lines that the refusal names, with the names of this test's folders."""
    make_model(tmp_path / "OLD")
    tensors = load_file(tmp_path / "OLD" / "model.safetensors")
    torch.save(tensors, tmp_path / "OLD" / "pytorch_model.bin")
    (tmp_path / "OLD" / "model.safetensors").unlink()
    call = refusal(tmp_path / "OLD").partition("; ")[2].partition(" and ")[0]
    assert call.startswith("AutoModelForCausalLM.")
    monkeypatch.chdir(tmp_path)
    for kind in ("AutoModelForCausalLM", "AutoTokenizer"):
        words = call.replace("AutoModelForCausalLM", kind).replace("OLD", "'OLD'")
        exec(f"from transformers import {kind}; {words.replace('NEW', repr('NEW'))}")  # noqa: S102
    written = load_file("NEW/model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert model_directory("NEW").samefile("NEW")
