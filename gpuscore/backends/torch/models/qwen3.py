"""Qwen3: RMS norm of each head's query and key before the rotary embedding."""

from gpuscore.backends.torch.hf_config import (
    DecoderConfig,
    RawConfig,
    decoder_config,
    window_by_layer_types,
)
from gpuscore.backends.torch.models.names import MODEL_WEIGHTS, layer_weights

ARCHITECTURE = "Qwen3ForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_WEIGHTS", "layer_weights", "read_config"]


def read_config(raw: RawConfig) -> DecoderConfig:
    bias = raw.flag("attention_bias")
    return decoder_config(
        raw,
        ARCHITECTURE,
        head_dim=raw.integer("head_dim", 128),
        sliding_window=window_by_layer_types(raw, raw.flag("use_sliding_window")),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )
