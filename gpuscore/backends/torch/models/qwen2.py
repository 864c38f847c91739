"""Qwen2 and Qwen2.5: biases on the query, key and value projections."""

from gpuscore.backends.torch.hf_config import (
    DecoderConfig,
    RawConfig,
    decoder_config,
    window_by_layer_types,
)
from gpuscore.backends.torch.models.names import MODEL_WEIGHTS, layer_weights

ARCHITECTURE = "Qwen2ForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_WEIGHTS", "layer_weights", "read_config"]


def read_config(raw: RawConfig) -> DecoderConfig:
    window = window_by_layer_types(raw, raw.flag("use_sliding_window"))
    return decoder_config(raw, ARCHITECTURE, sliding_window=window, qkv_bias=True)
