"""Gemma 1: norm weights stored minus 1, embeddings scaled, an MLP with a tanh GELU."""

from typing import Any

from gpuscore.backends.common.architectures.names import MODEL_WEIGHTS, layer_weights
from gpuscore.backends.common.hf_config import DecoderConfig, RawConfig, decoder_config
from gpuscore.errors import ConfigError

ARCHITECTURE = "GemmaForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_WEIGHTS", "every_gemma", "layer_weights", "read_config"]


def read_config(raw: RawConfig) -> DecoderConfig:
    # The first releases wrote "gelu" and meant its tanh form, which is what transformers computes.
    if raw.get("hidden_act") not in (None, "gelu", "gelu_pytorch_tanh"):
        raise ConfigError(
            f"config.json: hidden_act is {raw.get('hidden_act')!r}; "
            "supported: gelu_pytorch_tanh, and gelu, which means the same here"
        )
    return decoder_config(raw, ARCHITECTURE, tie_word_embeddings=True, **every_gemma(raw))


def every_gemma(raw: RawConfig) -> dict[str, Any]:
    """Fields that Gemma 1, 2 and 3 share."""
    activation = raw.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise ConfigError(
            f"config.json: hidden_activation is {activation!r}; supported: gelu_pytorch_tanh"
        )
    bias = raw.flag("attention_bias")
    return {
        "head_dim": raw.integer("head_dim", 256),
        "activation": "gelu_tanh",
        "embed_scale": raw.integer("hidden_size") ** 0.5,
        "one_plus_norms": True,
        "qkv_bias": bias,
        "o_bias": bias,
    }
