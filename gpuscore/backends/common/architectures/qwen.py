"""Reads config.json of Qwen2, Qwen2.5, Qwen3 and Qwen3-MoE."""

from typing import Any

from gpuscore.backends.common.hf_config import (
    DecoderConfig,
    Mixture,
    decoder_config,
    every_layer,
    upper_layer_windows,
)
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.errors import ConfigError
from gpuscore.models.files import shown


def qwen2(raw: RawConfig, name: str) -> DecoderConfig:
    """Read Qwen2 and Qwen2.5, whose query, key and value projections have biases."""
    return decoder_config(raw, name, windows=upper_layer_windows(raw), qkv_bias=True)


def qwen3(raw: RawConfig, name: str) -> DecoderConfig:
    """Read Qwen3, which applies an RMS norm to queries and keys before the rotary embedding."""
    return decoder_config(
        raw,
        name,
        head_dim=raw.integer("head_dim", 128),
        windows=upper_layer_windows(raw),
        **_common_fields(raw),
    )


def qwen3_moe(raw: RawConfig, name: str) -> DecoderConfig:
    """Read Qwen3-MoE, which has a mixture of experts as MLP in some or all layers."""
    windows = every_layer(raw, raw.flag("use_sliding_window"))
    return decoder_config(raw, name, windows=windows, mixture=_mixture(raw), **_common_fields(raw))


def _common_fields(raw: RawConfig) -> dict[str, Any]:
    """Return the fields that Qwen3 and Qwen3-MoE set in the same way."""
    bias = raw.flag("attention_bias")
    return {"qk_norm": True, "qkv_bias": bias, "o_bias": bias}


def _mixture(raw: RawConfig) -> Mixture:
    # transformers 5 writes num_local_experts; older files have num_experts.
    num_experts = raw.integer("num_local_experts", raw.integer("num_experts", 128))
    top_k = raw.integer("num_experts_per_tok", 8)
    if top_k > num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok is {top_k}; supported: at most num_experts, "
            f"{num_experts}"
        )
    step = raw.integer("decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ConfigError(
            f"config.json: mlp_only_layers must be a list of layers, found {shown(dense)}"
        )
    return Mixture(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=raw.integer("moe_intermediate_size"),
        norm_top_k=raw.flag("norm_topk_prob"),
        layers=tuple(
            i not in dense and (i + 1) % step == 0 for i in range(raw.integer("num_hidden_layers"))
        ),
    )
