"""Llama 2 and 3.x, and Mistral."""

from gpuscore.backends.common.hf_config import DecoderConfig, decoder_config, every_layer
from gpuscore.backends.common.raw_config import RawConfig


def llama(raw: RawConfig, name: str) -> DecoderConfig:
    """Read Llama: optional biases; its llama3 rotary scaling is read for every architecture."""
    bias = raw.flag("attention_bias")
    return decoder_config(raw, name, qkv_bias=bias, o_bias=bias, mlp_bias=raw.flag("mlp_bias"))


def mistral(raw: RawConfig, name: str) -> DecoderConfig:
    """Read Mistral: no biases; `sliding_window`, unless null, applies to every layer."""
    windows = every_layer(raw, windowed=raw.get("sliding_window") is not None)
    return decoder_config(raw, name, windows=windows)
