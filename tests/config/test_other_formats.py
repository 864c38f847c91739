"""Promise: a model of another format or kind is refused with what it is and what to do."""

import ast
import json
import shlex
import sys

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    CLIPConfig,
    Gemma3Config,
    ModernBertConfig,
    Qwen2VLConfig,
    Qwen3Config,
    T5Config,
    WhisperConfig,
    XLMRobertaConfig,
)

from gpuscore.backends import plan_backend
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.models.hub import model_directory
from support.models import make_model

LORA = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-0.6B", "r": 8}


def refusal(path) -> str:
    with pytest.raises(ConfigError) as error:
        model_directory(str(path))
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def command_in(message: str) -> list[str]:
    """Return the printed command as words."""
    words = shlex.split(message.partition(sys.executable)[2].partition("; delete")[0])
    return [sys.executable, *words]


@pytest.mark.parametrize(
    ("kind", "architecture", "words"),
    [
        (XLMRobertaConfig, "XLMRobertaForSequenceClassification", "an encoder, "),
        (ModernBertConfig, "ModernBertForMaskedLM", "an encoder, "),
        (T5Config, "T5ForConditionalGeneration", "an encoder-decoder"),
        (WhisperConfig, "WhisperForConditionalGeneration", "an encoder-decoder"),
        (CLIPConfig, "CLIPModel", "images or sound (vision_config)"),
        (Gemma3Config, "Gemma3ForConditionalGeneration", "images or sound (vision_config)"),
        (Qwen2VLConfig, "Qwen2VLForConditionalGeneration", "images or sound (vision_config)"),
        (Qwen3Config, "Qwen3Model", "a model without a head"),
    ],
)
def test_another_kind_of_model(tmp_path, kind, architecture, words):
    """The configurations are those that transformers writes."""
    kind(architectures=[architecture]).save_pretrained(tmp_path)
    message = refusal(tmp_path)
    assert f"is {architecture}, " in message
    assert words in message
    assert "gpuscore serves decoders" in message


def test_a_head_may_stand_in_the_name(tmp_path):
    """Such a model is refused for its architecture, which is read later."""
    Qwen3Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    assert model_directory(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model-Q4_K_M.gguf", "in model-Q4_K_M.gguf, llama.cpp's format"),
        ("consolidated.00.pth", "the format of the model's authors"),
        ("model.onnx", "ONNX"),
        ("onnx/model.onnx", "ONNX"),
        ("tf_model.h5", "TensorFlow's format"),
        ("flax_model.msgpack", "Flax's format"),
    ],
)
def test_weights_in_another_format(tmp_path, name, words):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"")
    assert words in refusal(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert model_directory(str(tmp_path)) == tmp_path, "safetensors are there, too"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("m.gguf", "is a GGUF file, llama.cpp's format"),
        ("model.safetensors", "give its directory, "),
        ("m.zip", "supported: a Hugging Face model directory"),
    ],
)
def test_a_file_in_place_of_a_directory(tmp_path, name, words):
    (tmp_path / name).write_bytes(b"")
    assert words in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "NVFP4"}},
            "quantised by ModelOpt to 'NVFP4'",
        ),
        ("config.json", {"quantization": {"group_size": 64, "bits": 4}}, "by MLX to 4 bits"),
    ],
)
def test_quantisation_that_config_json_does_not_name(tmp_path, file, content, words):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(content))
    assert words in refusal(tmp_path)


@pytest.mark.parametrize(
    ("method", "bits", "words"),
    [
        ("awq", {"bits": 4}, "quant_method is 'awq' (4 bits)"),
        ("gptq", {"bits": 3}, "quant_method is 'gptq' (3 bits)"),
        ("bitsandbytes", {"load_in_4bit": True}, "quant_method is 'bitsandbytes'; supported"),
        ("mxfp4", {}, "quant_method is 'mxfp4'; supported"),
    ],
)
def test_quantisation_by_name(tmp_path, method, bits, words):
    make_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **bits}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        plan_backend(model_directory(str(tmp_path)), ModelConfig())
    assert words in str(error.value)
    assert "quantise the original model: pip install llmcompressor" in str(error.value)


@pytest.mark.parametrize("whole_weights", [False, True])
@pytest.mark.parametrize(
    ("task", "auto_class"),
    [
        ("CAUSAL_LM", "AutoPeftModelForCausalLM"),
        ("SEQ_CLS", "AutoPeftModelForSequenceClassification"),
    ],
)
def test_an_adapter_comes_with_the_lines_that_merge_it(tmp_path, task, auto_class, whole_weights):
    """Beside whole weights too: transformers loads the base model then, not these weights."""
    if whole_weights:
        make_model(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(LORA | {"task_type": task}))
    message = refusal(tmp_path)
    assert "a 'LORA' adapter of 'Qwen/Qwen3-0.6B'" in message
    *start, code = command_in(message)
    assert start == [sys.executable, "-c"]
    ast.parse(code)
    assert f"{auto_class}.from_pretrained({str(tmp_path)!r}).merge_and_unload()" in code
    assert "AutoTokenizer.from_pretrained('Qwen/Qwen3-0.6B').save_pretrained('MERGED')" in code


def test_an_adapter_that_cannot_be_merged(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(LORA | {"peft_type": "PROMPT_TUNING"}))
    assert "'PROMPT_TUNING' adapter" in refusal(tmp_path)


def pickled(directory, name="pytorch_model.bin"):
    """Make a model whose weights torch has pickled; return its tensors."""
    make_model(directory)
    tensors = load_file(directory / "model.safetensors")
    torch.save(tensors, directory / name)
    (directory / "model.safetensors").unlink()
    return tensors


def test_pickled_weights_come_with_the_lines_that_convert_them(tmp_path, monkeypatch):
    """The lines run as they are printed; the folder has a quote and a bracket."""
    directory = tmp_path / "it's [mine]"
    tensors = pickled(directory)
    message = refusal(directory)
    assert "in pytorch_model.bin, pickled by torch" in message
    *start, code = command_in(message)
    assert start == [sys.executable, "-c"]
    monkeypatch.chdir(tmp_path)
    exec(code)  # noqa: S102  (in this process, which has loaded transformers)
    written = load_file("CONVERTED/model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    made, original = (path / "tokenizer.json" for path in (tmp_path / "CONVERTED", directory))
    text = "A lamp, 17 metres!"
    assert Tokenizer.from_file(str(made)).encode(text).ids == (
        Tokenizer.from_file(str(original)).encode(text).ids
    )


def test_pickled_shards_of_a_classifier_keep_its_head(tmp_path):
    pickled(tmp_path, "pytorch_model-00001-of-00002.bin")
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["Qwen3ForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "AutoModelForSequenceClassification.from_pretrained(" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["m.gguf", "m.gguf/m.gguf"])
def test_a_gguf_file_is_refused_with_what_its_reading_loses(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"")
    message = refusal(tmp_path / "m.gguf")
    assert "load the model's safetensors" in message
    assert "head sizes, RoPE scaling and soft caps" in message
    assert "before-demolition" in message
