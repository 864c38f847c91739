"""Gemma 2: norms before and after attention and MLP, soft-caps, a window in every other layer."""

from typing import Any

from gpuscore.backends.common.architectures.gemma import every_gemma
from gpuscore.backends.common.architectures.names import MODEL_WEIGHTS, layer_weights
from gpuscore.backends.common.hf_config import (
    DecoderConfig,
    RawConfig,
    decoder_config,
    layer_windows,
)

ARCHITECTURE = "Gemma2ForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_WEIGHTS", "gemma", "layer_weights", "read_config"]


def read_config(raw: RawConfig) -> DecoderConfig:
    return decoder_config(
        raw,
        ARCHITECTURE,
        tie_word_embeddings=True,
        windows=layer_windows(raw, lambda layer: layer % 2 == 0),
        attention_softcap=raw.optional_number("attn_logit_softcapping", 50.0),
        final_softcap=raw.optional_number("final_logit_softcapping", 30.0),
        **gemma(raw),
    )


def gemma(raw: RawConfig) -> dict[str, Any]:
    """Fields that Gemma 2 and 3 share; their hidden_act is not read."""
    return every_gemma(raw) | {
        "attention_scale": raw.number("query_pre_attn_scalar", 256) ** -0.5,
        "post_norms": True,
        # Its residual stream exceeds float16's range.
        "dtypes": ("bfloat16", "float32"),
    }
