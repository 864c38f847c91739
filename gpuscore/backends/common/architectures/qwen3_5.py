"""Qwen3.5's dense text models: layers of linear attention, with full attention in between."""

from collections.abc import Mapping
from typing import Any

from gpuscore.backends.common.hf_config import FULL, LINEAR, DecoderConfig, DeltaNet, decoder_config
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.backends.common.ropes import read_rope
from gpuscore.errors import ConfigError
from gpuscore.models.files import as_object, shown

ROTARY_FRACTION = 0.25  # the default fraction of a head that is rotated
# A vision-language model's config.json may have these keys at the top level and in `text_config`.
# The top level counts.
_SHARED_KEYS = {
    *("architectures", "dtype", "torch_dtype", "tie_word_embeddings", "id2label", "num_labels"),
    *("problem_type", "quantization_config", "compression_config"),
}
# These are about images, which are not served.
_IMAGE_KEYS = {
    *("text_config", "vision_config", "model_type", "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id", "language_model_only"),
}


def qwen3_5(raw: RawConfig, name: str) -> DecoderConfig:
    """Read Qwen3.5: linear layers, rotation of a quarter of each head, gated attention, norm
    weights stored minus 1."""
    head_dim = raw.integer("head_dim")
    return decoder_config(
        raw,
        name,
        head_dim=head_dim,
        rope=read_rope(RawConfig(raw.fields | _rope_settings(raw))),
        rotary_dim=_rotary_dim(raw, head_dim),
        delta_net=_delta_net(raw),
        qk_norm=True,
        one_plus_norms=True,
        output_gate=True,
    )


def text_tower(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text part of a vision-language model's config.json, as a config.json of its own.

    Raises:
        ConfigError: a key has different values in `text_config` and beside it.
    """
    text = as_object(fields.get("text_config"), "config.json: text_config")
    beside = {name: value for name, value in fields.items() if name not in _IMAGE_KEYS}
    for name in sorted(set(beside) & set(text) - _SHARED_KEYS):
        if beside[name] != text[name]:
            raise ConfigError(
                f"config.json: {name} is {shown(beside[name])}, but {shown(text[name])} in "
                "text_config; transformers reads the latter; supported: one of them, or both equal"
            )
    tied = bool(fields.get("tie_word_embeddings"))
    if text.get("tie_word_embeddings") not in (None, tied):
        raise ConfigError(
            f"config.json: tie_word_embeddings is {tied}, and {not tied} in text_config; "
            "supported: equal values"
        )
    return {**text, **beside, "tie_word_embeddings": tied}


# Keys of RoPE that only Qwen3.5 has. For images, sections of a head are rotated by height or
# width. For text, all of them are rotated by the position, so the sections change nothing.
_ROPE_KEYS = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


def _rope_settings(raw: RawConfig) -> dict[str, Any]:
    """Return RoPE's settings without the keys that only Qwen3.5 has."""
    return {
        key: {name: value for name, value in rope.items() if name not in _ROPE_KEYS}
        for key in ("rope_parameters", "rope_scaling")
        if isinstance(rope := raw.get(key), dict)
    }


def _rotary_dim(raw: RawConfig, head_dim: int) -> int:
    """Return how many numbers of a head are rotated; the factor in RoPE's settings comes first."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling")
    in_rope = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    beside = raw.get("partial_rotary_factor")
    factor = next((value for value in (in_rope, beside) if value is not None), ROTARY_FRACTION)
    fraction = RawConfig({"partial_rotary_factor": factor}).number("partial_rotary_factor")
    size = int(head_dim * fraction)
    if fraction > 1 or size < 2 or size % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor is {shown(factor)}, which rotates {size} of "
            f"{head_dim} numbers of a head; supported: an even number from 2 to {head_dim}"
        )
    return size


def _delta_net(raw: RawConfig) -> DeltaNet:
    net = DeltaNet(
        num_key_heads=raw.integer("linear_num_key_heads"),
        num_value_heads=raw.integer("linear_num_value_heads"),
        key_dim=raw.integer("linear_key_head_dim"),
        value_dim=raw.integer("linear_value_head_dim"),
        kernel=raw.integer("linear_conv_kernel_dim"),
        layers=_linear_layers(raw),
    )
    if net.num_value_heads % net.num_key_heads or net.kernel < 2:
        raise ConfigError(
            f"config.json: linear_num_value_heads {net.num_value_heads} must be a multiple of "
            f"linear_num_key_heads {net.num_key_heads}, and linear_conv_kernel_dim {net.kernel} "
            "at least 2"
        )
    return net


def _linear_layers(raw: RawConfig) -> tuple[bool, ...]:
    num_layers = raw.integer("num_hidden_layers")
    kinds = raw.get("layer_types")
    if kinds is None:
        interval = raw.integer("full_attention_interval")
        kinds = [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(num_layers)]
    known = isinstance(kinds, list) and all(kind in (FULL, LINEAR) for kind in kinds)
    if not known or len(kinds) != num_layers or FULL not in kinds:
        raise ConfigError(
            f"config.json: layer_types is {shown(kinds)}; supported: {num_layers} entries "
            f"(num_hidden_layers), each {FULL} or {LINEAR}, and at least one {FULL}"
        )
    return tuple(kind == LINEAR for kind in kinds)
