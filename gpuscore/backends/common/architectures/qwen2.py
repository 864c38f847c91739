"""Qwen2 and Qwen2.5: biases on the query, key and value projections."""

from gpuscore.backends.common.architectures.names import MODEL_WEIGHTS, layer_weights
from gpuscore.backends.common.hf_config import (
    DecoderConfig,
    RawConfig,
    decoder_config,
    upper_layer_windows,
)

ARCHITECTURE = "Qwen2ForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_WEIGHTS", "layer_weights", "read_config"]


def read_config(raw: RawConfig) -> DecoderConfig:
    windows = upper_layer_windows(raw)
    return decoder_config(raw, ARCHITECTURE, windows=windows, qkv_bias=True)
