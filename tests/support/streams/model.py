"""Tiny Qwen3 checkpoints with random weights, written without transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.hf_config import RawConfig
from gpuscore.backends.common.shapes import weight_shapes
from support.quantized import quantised

VOCAB = 1000  # the simulation's tokens
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}


def write_model(directory: Path) -> Path:
    """Write a mixture of experts into `directory`, and a dense model in INT8 into its folder
    "int8"."""
    _write(directory, MIXTURE)
    _write(directory / "dense", DENSE)
    quantised(directory / "dense", directory / "int8")
    return directory


def _write(directory: Path, config: Mapping[str, Any]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    architecture = read_architecture(RawConfig.read(directory))
    shapes = weight_shapes(architecture.config)
    names = {name: part for part, name in architecture.model_weights.items() if part != "lm_head"}
    for index, layer in enumerate(architecture.layer_weights):
        names |= {
            f"model.layers.{index}.{name.format(expert=expert)}": part
            for part, name in layer.items()
            for expert in range(config.get("num_experts", 1))
        }
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: 0.3 * torch.randn(shapes[part], generator=generator) + (len(shapes[part]) == 1)
        for name, part in names.items()
    }
    save_file(weights, directory / "model.safetensors")
