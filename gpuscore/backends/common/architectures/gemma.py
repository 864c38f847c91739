"""Gemma 1, 2 and 3 (text only)."""

from typing import Any

from gpuscore.backends.common.hf_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    decoder_config,
    layer_windows,
)
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.backends.common.ropes import Rope, read_rope
from gpuscore.errors import ConfigError


def gemma(raw: RawConfig, name: str) -> DecoderConfig:
    """Read Gemma 1: norm weights stored minus 1, embeddings scaled, an MLP with a tanh GELU."""
    # The first releases wrote "gelu" and meant its tanh form, which is what transformers computes.
    if raw.get("hidden_act") not in (None, "gelu", "gelu_pytorch_tanh"):
        raise ConfigError(
            f"config.json: hidden_act is {raw.get('hidden_act')!r}; "
            "supported: gelu_pytorch_tanh, and gelu, which means the same here"
        )
    return decoder_config(raw, name, tie_word_embeddings=True, **_every_gemma(raw))


def gemma2(raw: RawConfig, name: str) -> DecoderConfig:
    """Read Gemma 2: norms before and after attention and MLP, soft-caps, alternate windows."""
    return decoder_config(
        raw,
        name,
        tie_word_embeddings=True,
        windows=layer_windows(raw, lambda layer: layer % 2 == 0),
        attention_softcap=raw.optional_number("attn_logit_softcapping", 50.0),
        final_softcap=raw.optional_number("final_logit_softcapping", 30.0),
        **_gemma_2_and_3(raw),
    )


def gemma3(raw: RawConfig, name: str) -> DecoderConfig:
    """Read Gemma 3: Gemma 2's norms, QK norm, and another rope in layers with a window."""
    pattern = raw.integer("sliding_window_pattern", 6)
    rope, window_rope = _ropes(raw)
    return decoder_config(
        raw,
        name,
        tie_word_embeddings=True,
        windows=layer_windows(raw, lambda layer: (layer + 1) % pattern != 0),
        rope=rope,
        window_rope=window_rope,
        final_softcap=raw.optional_number("final_logit_softcapping"),
        qk_norm=True,
        **_gemma_2_and_3(raw),
    )


def _gemma_2_and_3(raw: RawConfig) -> dict[str, Any]:
    """Fields that Gemma 2 and 3 share; their hidden_act is not read."""
    return _every_gemma(raw) | {
        "attention_scale": raw.number("query_pre_attn_scalar", 256) ** -0.5,
        "post_norms": True,
        # Its residual stream exceeds float16's range.
        "dtypes": ("bfloat16", "float32"),
    }


def _every_gemma(raw: RawConfig) -> dict[str, Any]:
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


def _ropes(raw: RawConfig) -> tuple[Rope, Rope]:
    """Ropes of layers without and with a window; older files' `rope_scaling` is for the former."""
    windowed = RawConfig({"rope_parameters": raw.get("rope_parameters")})
    local = Rope(raw.number("rope_local_base_freq", 10000.0))
    if raw.get("rope_parameters"):
        return read_rope(raw, FULL, 1e6), read_rope(windowed, SLIDING, local.theta)
    return read_rope(raw, theta=1e6), local
