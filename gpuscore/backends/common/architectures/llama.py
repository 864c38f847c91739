"""Llama 2 and 3.x, Mistral, and Granite."""

import math

from gpuscore.backends.common.hf_config import DecoderConfig, decoder_config, every_layer
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.errors import ConfigError


def llama(raw: RawConfig, name: str) -> DecoderConfig:
    """Read Llama: optional biases; its llama3 rotary scaling is read for every architecture."""
    bias = raw.flag("attention_bias")
    return decoder_config(raw, name, qkv_bias=bias, o_bias=bias, mlp_bias=raw.flag("mlp_bias"))


def granite(raw: RawConfig, name: str) -> DecoderConfig:
    """Read Granite: Llama with multipliers of embeddings, residuals, scores and logits.

    The residual stream is stored divided by the residual multiplier, so the layers' outputs are
    added as they are. Norms give equal results if their eps is divided by the multiplier squared.
    """
    bias = raw.flag("attention_bias")
    residual = raw.number("residual_multiplier", 1.0)
    scaling = raw.number("logits_scaling", 1.0)
    if math.frexp(scaling)[0] != 0.5:
        raise ConfigError(
            f"config.json: logits_scaling is {scaling:g}; supported: powers of two, by which the "
            "final norm's weight is divided without rounding"
        )
    return decoder_config(
        raw,
        name,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=raw.flag("mlp_bias"),
        attention_scale=raw.number("attention_multiplier", 1.0),
        embed_scale=raw.number("embedding_multiplier", 1.0),
        stream_divisor=residual,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6) / residual**2,
        logits_divisor=scaling,
    )


def mistral(raw: RawConfig, name: str) -> DecoderConfig:
    """Read Mistral: no biases; `sliding_window`, unless null, applies to every layer."""
    windows = every_layer(raw, windowed=raw.get("sliding_window") is not None)
    return decoder_config(raw, name, windows=windows)
