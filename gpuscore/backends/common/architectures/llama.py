"""Llama 2 and 3.x, with the llama3 rotary scaling; optional biases."""

from gpuscore.backends.common.architectures.names import MODEL_WEIGHTS, layer_weights
from gpuscore.backends.common.hf_config import DecoderConfig, RawConfig, decoder_config

ARCHITECTURE = "LlamaForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_WEIGHTS", "layer_weights", "read_config"]


def read_config(raw: RawConfig) -> DecoderConfig:
    bias = raw.flag("attention_bias")
    return decoder_config(
        raw, ARCHITECTURE, qkv_bias=bias, o_bias=bias, mlp_bias=raw.flag("mlp_bias")
    )
