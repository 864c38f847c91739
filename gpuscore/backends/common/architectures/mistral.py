"""Mistral: Llama without biases; `sliding_window`, unless null, applies to every layer."""

from gpuscore.backends.common.architectures.names import MODEL_WEIGHTS, layer_weights
from gpuscore.backends.common.hf_config import DecoderConfig, RawConfig, decoder_config, every_layer

ARCHITECTURE = "MistralForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_WEIGHTS", "layer_weights", "read_config"]


def read_config(raw: RawConfig) -> DecoderConfig:
    windows = every_layer(raw, windowed=raw.get("sliding_window") is not None)
    return decoder_config(raw, ARCHITECTURE, windows=windows)
