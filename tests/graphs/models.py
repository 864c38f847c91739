"""Configurations of real models; their weights are meta tensors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from gpuscore.backends.common.architectures import Architecture
from gpuscore.backends.common.quantization import LINEAR
from gpuscore.backends.common.shapes import weight_shapes
from support.model_configs import LLAMA_8B, QWEN3, QWEN3_06B
from support.quantized import FORMATS, section

# Qwen3-30B-A3B with 4 of its 48 layers, the first of which is dense here.
MIXTURE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Model:
    """A configuration and the settings it is checked with."""

    name: str
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    large_pool: bool = False  # over 2^31 elements per layer and side
    plan: Mapping[str, Any] = field(default_factory=dict)  # fields of TorchPlan that no flag sets

    def write(self, folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder


MODELS = (
    Model("Qwen3-0.6B", QWEN3_06B, {"cuda_graph_tokens": 64}),
    # All graphs, at a few layers. So few that an H200 holds over 2^31 elements of keys in each.
    Model("Qwen3-0.6B, 4 layers", QWEN3_06B | {"num_hidden_layers": 4}, {}, large_pool=True),
    Model(
        "Qwen3-0.6B, int8, 4 layers",
        QWEN3_06B | {"num_hidden_layers": 4, "quantization_config": section("int8")},
        {"cuda_graph_tokens": 48},
        large_pool=True,
    ),
    Model(
        "Qwen3-0.6B, fp8, 4 layers",
        QWEN3_06B | {"num_hidden_layers": 4, "quantization_config": section("fp8")},
        {"cuda_graph_tokens": 48},
        large_pool=True,
    ),
    Model("Llama-3.1-8B", LLAMA_8B, {"cuda_graph_tokens": 64}),
    Model("Qwen3-30B-A3B, 4 layers", MIXTURE, {"cuda_graph_tokens": 64}),
)


class EmptyFiles:
    """Stands for `CheckpointFiles`: every tensor has its shape and no contents."""

    def __init__(
        self,
        directory: Path,
        architecture: Architecture,
        framework: str,
        progress: object = None,
        shard: object = None,
        device: str = "cuda",
    ) -> None:
        self.shapes, self._device = weight_shapes(architecture.config), device
        self.storage = architecture.storage

    def scale(self, part: str, name: str) -> Tensor | None:
        """Return a scale per row of a linear layer's weight; None if it is not quantised."""
        if self.storage is None or part not in LINEAR:
            return None
        return torch.empty(self.shapes[part][0], device=self._device)

    def tensor(self, part: str, name: str) -> Tensor:
        stored = self.storage is not None and part in LINEAR
        dtype = FORMATS[self.storage.weights][0] if stored else torch.bfloat16
        return torch.empty(self.shapes[part], dtype=dtype, device=self._device)

    def refuse_left_over(self, tied: str | None) -> None:
        """Accept every checkpoint."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close no file."""
