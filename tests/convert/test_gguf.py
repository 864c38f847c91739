"""Promise: a converted GGUF file scores as the model from which it was made.

The files are written as llama.cpp writes them; the references are the models and tokenizers of
before.
"""

import json

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quants
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers.integrations.gguf.dequant import GGML_BLOCK
from transformers.integrations.gguf.dequant import dequantize as transformers_values

from gpuscore import Scorer
from support.gguf_files import LLAMA3_ROPE, SIZE, SPECIAL, TEMPLATE, GgufModel
from support.models import reference_logprobs
from support.slow import slow

MODELS = [
    *("llama llama-bpe", "llama smollm", "qwen2 qwen2", "qwen3 qwen2", "gemma2", "gemma3"),
    *slow("llama", "llama gpt-2"),
]
TEXTS = (
    *("", "yes  3 item 123: café", "  lead  and trail ", "\n\n 3.14 e\u0301 \u2028 don't WE'LL"),
    *("Is  this <|turn|>wooden chair?  12", "你好 🙂</s>  x", "The chair<|turn|> 1", "a lampshade"),
)


@pytest.mark.parametrize("name", MODELS)
def test_it_scores_as_the_original(tmp_path, convert, name):
    made = GgufModel(tmp_path, *name.split())
    directory = convert(made.write())
    rng = np.random.default_rng(1)
    query, *items = (rng.integers(0, SIZE, length).tolist() for length in (40, 3, 1, 25))
    labels = list(range(0, SIZE, 7))
    expected = reference_logprobs(made.model, [query + item for item in items])[:, labels]
    with Scorer(str(directory), dtype="float32", device="cpu", max_batch_tokens=64) as scorer:
        got = scorer.score(query, items, label_token_ids=labels).scores
    np.testing.assert_allclose(np.log(got), expected, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_texts_get_the_ids_of_the_original(tmp_path, convert, name):
    made = GgufModel(tmp_path, *name.split())
    directory = convert(made.write())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in TEXTS:
        assert tokenizer.encode(text).ids == made.tokenizer.encode(text).ids, text
    for token in SPECIAL:
        assert tokenizer.token_to_id(token) == made.tokenizer.token_to_id(token)
    assert (directory / "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.parametrize(("architecture", "factor"), [("llama", 32.0), *slow(("llama", 8.0))])
def test_llama_3_scales_rope_by_a_tensor(tmp_path, convert, architecture, factor):
    rope = LLAMA3_ROPE | {"factor": factor}
    made = GgufModel(tmp_path, architecture, "llama-bpe", rope_parameters=rope, head_dim=64)
    config = json.loads((convert(made.write()) / "config.json").read_text())
    assert config["rope_parameters"] == rope


def test_an_untied_head_and_linear_scaling(tmp_path, convert):
    made = GgufModel(tmp_path, "llama", "llama-bpe", tie_word_embeddings=False)
    made.fields |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    directory = convert(made.write())
    config = json.loads((directory / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["rope_parameters"] == {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    head = load_file(directory / "model.safetensors")["lm_head.weight"]
    assert torch.equal(head, made.model.lm_head.weight)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_the_dtype_is_that_of_the_source(tmp_path, convert, capsys, kind, dtype):
    made = GgufModel(tmp_path, "llama", "gpt-2", hidden_size=64, intermediate_size=96)
    wide = [name for name, values in made.tensors.items() if values.ndim > 1]
    made.kinds = dict.fromkeys(wide, GGMLQuantizationType[kind])
    directory = convert(made.write())
    written = load_file(directory / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {getattr(torch, dtype)}
    assert f"in {dtype} (its matrices are {kind})" in capsys.readouterr().out
    assert json.loads((directory / "config.json").read_text())["dtype"] == dtype


KINDS = sorted(kind.name for kind in quants._type_traits if kind.name != "BF16")


def random_blocks(kind, rows, columns):
    """Return stored rows whose scales, in whatever place, are finite: every byte is under 64."""
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    return rng.integers(0, 60, (rows, columns // block * size), dtype=np.uint8)


def test_every_quantised_type(tmp_path, convert):
    """References: transformers' own dequantisation, and gguf's for types that it does not have."""
    made = GgufModel(
        tmp_path, "llama", "gpt-2", hidden_size=256, intermediate_size=256, head_dim=64,
        num_key_value_heads=4, num_hidden_layers=len(KINDS),
    )  # fmt: skip
    for layer, name in enumerate(KINDS):
        kind, tensor = GGMLQuantizationType[name], f"blk.{layer}.ffn_up.weight"
        made.kinds[tensor], made.raw[tensor] = kind, random_blocks(kind, 256, 256)
    written = load_file(convert(made.write(), "--dtype", "float32") / "model.safetensors")
    compared = 0
    for layer, name in enumerate(KINDS):
        kind, raw = GGMLQuantizationType[name], made.raw[f"blk.{layer}.ffn_up.weight"]
        got = written[f"model.layers.{layer}.mlp.up_proj.weight"]
        expected = torch.from_numpy(dequantize(raw, kind).copy())
        if kind in GGML_BLOCK:
            compared += 1
            expected = transformers_values(torch.from_numpy(raw).flatten(), int(kind)).reshape(
                256, 256
            )
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
        assert expected.std() > 0
    assert compared >= 15
