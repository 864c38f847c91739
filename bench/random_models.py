"""Models of random weights, in the shapes of real ones, for measurements without a download."""

from pathlib import Path
from typing import Any

QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
# The same products, in seconds instead of minutes.
FOUR_LAYERS: dict[str, Any] = QWEN3_06B | {"vocab_size": 32768, "num_hidden_layers": 4}
SMALL: dict[str, Any] = QWEN3_06B | {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# Layers of Qwen3-30B-A3B, with a quarter of the experts and half of each row's choices.
MIXTURE: dict[str, Any] = QWEN3_06B | {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
SMALL_MIXTURE: dict[str, Any] = SMALL | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
}
TINY: dict[str, Any] = SMALL | {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
QWEN35_08B: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}
SMALL_HYBRID: dict[str, Any] = QWEN35_08B | {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-0.6b-4-layers": FOUR_LAYERS,
    "qwen3-moe-4-layers": MIXTURE,
    "qwen3.5-0.8b": QWEN35_08B,
    "small": SMALL,
    "small-hybrid": SMALL_HYBRID,
    "small-moe": SMALL_MIXTURE,
    "tiny": TINY,
}


def make_model(shape: str, dtype: str, scratch: Path) -> Path:
    """Return a Hugging Face directory with random weights of a shape, made once.

    Norm weights differ from 1, and logits have a standard deviation over 1.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

    directory = scratch / f"{shape}-{dtype}"
    if (directory / "model.safetensors").is_file():
        return directory
    torch.manual_seed(0)
    make: type[Any] = Qwen3MoeConfig if "num_experts" in SHAPES[shape] else Qwen3Config
    make = Qwen3_5TextConfig if "linear_num_key_heads" in SHAPES[shape] else make
    config = make(**SHAPES[shape])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model = model.to(getattr(torch, dtype)).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                # Qwen3.5 stores the weights of its norms less 1, except those in linear layers.
                less_1 = "linear_num_key_heads" in SHAPES[shape] and "linear_attn" not in name
                parameter.copy_((0 if less_1 else 1) + 0.2 * torch.randn(parameter.shape))
            elif parameter.ndim == 3:  # a convolution over a few tokens
                parameter.copy_(0.7 * torch.randn(parameter.shape))
            else:
                spread = 1.4 * parameter.shape[-1] ** -0.5
                parameter.copy_(spread * torch.randn(parameter.shape))
    model.tie_weights()
    model.save_pretrained(directory)
    return directory
