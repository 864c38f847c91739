"""Gemma 3, text only: Gemma 2's norms, QK norm, and another rope in layers with a window."""

from gpuscore.backends.common.architectures.gemma2 import gemma
from gpuscore.backends.common.architectures.names import MODEL_WEIGHTS, layer_weights
from gpuscore.backends.common.hf_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    RawConfig,
    Rope,
    decoder_config,
    layer_windows,
    read_rope,
)

ARCHITECTURE = "Gemma3ForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_WEIGHTS", "layer_weights", "read_config"]


def read_config(raw: RawConfig) -> DecoderConfig:
    pattern = raw.integer("sliding_window_pattern", 6)
    rope, window_rope = _ropes(raw)
    return decoder_config(
        raw,
        ARCHITECTURE,
        tie_word_embeddings=True,
        windows=layer_windows(raw, lambda layer: (layer + 1) % pattern != 0),
        rope=rope,
        window_rope=window_rope,
        final_softcap=raw.optional_number("final_logit_softcapping"),
        qk_norm=True,
        **gemma(raw),
    )


def _ropes(raw: RawConfig) -> tuple[Rope, Rope]:
    """Ropes of layers without and with a window; older files' `rope_scaling` is for the former."""
    windowed = RawConfig({"rope_parameters": raw.get("rope_parameters")})
    local = Rope(raw.number("rope_local_base_freq", 10000.0))
    if raw.get("rope_parameters"):
        return read_rope(raw, FULL, 1e6), read_rope(windowed, SLIDING, local.theta)
    return read_rope(raw, theta=1e6), local
