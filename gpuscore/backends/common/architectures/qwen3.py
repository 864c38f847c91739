"""Qwen3: RMS norm of each head's query and key before the rotary embedding."""

from gpuscore.backends.common.architectures.names import MODEL_WEIGHTS, layer_weights
from gpuscore.backends.common.hf_config import (
    DecoderConfig,
    RawConfig,
    decoder_config,
    upper_layer_windows,
)

ARCHITECTURE = "Qwen3ForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_WEIGHTS", "layer_weights", "read_config"]


def read_config(raw: RawConfig) -> DecoderConfig:
    bias = raw.flag("attention_bias")
    return decoder_config(
        raw,
        ARCHITECTURE,
        head_dim=raw.integer("head_dim", 128),
        windows=upper_layer_windows(raw),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )
