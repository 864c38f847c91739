"""Models of random weights, in the shapes of real ones, for measurements without a download."""

from pathlib import Path
from typing import Any

from support.model_configs import QWEN3_06B, QWEN35_08B

SMALLER = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
OF_STATES = {"num_hidden_layers": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
TINY = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3_06B,
    "qwen3.5-0.8b": QWEN35_08B,
    "small": QWEN3_06B | SMALLER,
    "small-hybrid": QWEN35_08B | SMALLER | OF_STATES,
    "tiny": QWEN3_06B | SMALLER | TINY,
}


def make_model(shape: str, dtype: str, scratch: Path) -> Path:
    """Return a Hugging Face directory with random weights of a shape, made once.

    Norm weights differ from 1, and logits have a standard deviation over 1.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

    directory = scratch / f"{shape}-{dtype}"
    if (directory / "model.safetensors").is_file():
        return directory
    torch.manual_seed(0)
    hybrid = "full_attention_interval" in SHAPES[shape]
    make: type[Any] = Qwen3_5TextConfig if hybrid else Qwen3Config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make(**SHAPES[shape]))  # type: ignore[no-untyped-call]
    model = model.to(getattr(torch, dtype)).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                # Qwen3.5 stores the weights of its norms less 1, except those in linear layers.
                less_1 = hybrid and "linear_attn" not in name
                parameter.copy_((0 if less_1 else 1) + 0.2 * torch.randn(parameter.shape))
            elif parameter.ndim == 3:  # a convolution over a few tokens
                parameter.copy_(0.7 * torch.randn(parameter.shape))
            else:
                spread = 1.4 * parameter.shape[-1] ** -0.5
                parameter.copy_(spread * torch.randn(parameter.shape))
    model.tie_weights()
    model.save_pretrained(directory)
    return directory
