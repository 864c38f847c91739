"""Promise: a conversion that goes wrong is found and leaves nothing.

Each defect is planted where transformers or the disk could cause it; the check has to see it.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpuscore.commands.convert.gguf_source import GgufSource
from support.gguf_files import GgufModel


def tensors(change):
    """Return a defect of the written tensors."""

    def plant(directory):
        path = directory / "model.safetensors"
        written = load_file(path)
        change(written)
        save_file(written, path, {"format": "pt"})

    return plant


def swap(written):
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    written[first], written[second] = written[second], written[first]


def swap_layers(written):
    first, second = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    written[first], written[second] = written[second], written[first]


def leave_permuted(written):
    name = "model.layers.1.self_attn.k_proj.weight"
    pairs = written[name].reshape(2, 2, 8, -1)  # [heads, half, pair, hidden]
    written[name] = pairs.transpose(1, 2).reshape(written[name].shape).contiguous()


def one_bit(written):
    weight = written["model.layers.2.self_attn.o_proj.weight"]
    weight.view(torch.int32)[5, 7] ^= 1


def text(name, before, after):
    """Return a defect of a written text."""

    def plant(directory):
        path = directory / name
        content = path.read_text()
        assert before in content
        path.write_text(content.replace(before, after, 1))

    return plant


def exchange_tokens(directory):
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["!"], vocabulary["?"] = vocabulary["?"], vocabulary["!"]
    path.write_text(json.dumps(content))


NOT_AS = "was not written as"
DEFECTS = {
    "swapped tensors": (tensors(swap), f"gate_proj.weight {NOT_AS}"),
    "swapped layers": (tensors(swap_layers), f"layers.0.input_layernorm.weight {NOT_AS}"),
    "rows in llama.cpp's order": (tensors(leave_permuted), f"k_proj.weight {NOT_AS}"),
    "one bit": (tensors(one_bit), f"layers.2.self_attn.o_proj.weight {NOT_AS}"),
    "a dropped tensor": (
        tensors(lambda written: written.pop("model.norm.weight")),
        "has no tensor model.norm.weight",
    ),
    "one tensor more": (
        tensors(lambda written: written.update(x=torch.zeros(3))),
        "holds 1 tensors that LlamaForCausalLM does not use, such as x",
    ),
    "another dtype": (
        tensors(lambda written: written.update({k: v.half() for k, v in written.items()})),
        NOT_AS,
    ),
    "no template": (lambda made: (made / "chat_template.jinja").unlink(), "chat template"),
    "a turn of the template": (text("chat_template.jinja", "<|turn|>", ""), "chat template"),
    "no tokenizer": (lambda made: (made / "tokenizer.json").unlink(), "tokenizer.json"),
    "other ids": (exchange_tokens, "has other tokens at 2 ids"),
    "merges first": (
        text("tokenizer.json", '"ignore_merges": true', '"ignore_merges": false'),
        "its tokenizer was not written as it was made",
    ),
    "no layers": (text("config.json", '"num_hidden_layers": 3', '"num_hidden_layers": 2'), "use"),
}


@pytest.mark.parametrize("case", DEFECTS)
def test_a_planted_defect(tmp_path, refused, monkeypatch, case):
    plant, words = DEFECTS[case]
    write = GgufSource.write

    def write_and_break(source, directory, dtype):
        write(source, directory, dtype)
        plant(directory)

    monkeypatch.setattr(GgufSource, "write", write_and_break)
    assert words in refused(GgufModel(tmp_path, "llama", "llama-bpe").write())
