"""Reads a Hugging Face config.json into the fields that the decoder needs, and refuses the rest."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuscore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything that distinguishes one supported decoder from another."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    max_position_embeddings: int
    sliding_window: int | None  # None = every layer sees every earlier token
    tie_word_embeddings: bool
    checkpoint_dtype: str
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False


class RawConfig:
    """config.json with typed access; a missing or mistyped field is named in the error."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    @classmethod
    def read(cls, directory: Path) -> "RawConfig":
        path = directory / "config.json"
        if not path.is_file():
            raise ConfigError(f"{directory} has no config.json: not a Hugging Face model directory")
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{path} must hold a JSON object")
        return cls(fields)

    def get(self, name: str) -> Any:
        return self.fields.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.fields.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"config.json: {name} must be a positive integer, found {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.fields.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"config.json: {name} must be a positive number, found {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.fields.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {name} must be true or false, found {value!r}")
        return value


# Fields that change what a model computes in ways the decoder does not know:
# (field, values that are harmless, what is supported).
REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("quantization_config", (None,), "unquantised bfloat16, float16 or float32 weights"),
    ("auto_map", (None, {}), "models without remote code"),
    ("is_causal", (None, True), "causal models"),
    ("use_bidirectional_attention", (None, False), "causal models"),
    ("hidden_act", ("silu",), "silu"),
    ("partial_rotary_factor", (None, 1, 1.0), "rotary embedding over the whole head"),
    ("attn_logit_softcapping", (None,), "attention without a soft-cap"),
    ("final_logit_softcapping", (None,), "logits without a soft-cap"),
    ("pretraining_tp", (None, 1), "pretraining_tp 1"),
)


def refuse_unsupported(raw: RawConfig) -> None:
    """Raise ConfigError, naming the field, for anything that would be computed wrongly."""
    for field, harmless, supported in REFUSED:
        value = raw.get(field)
        if value not in harmless:
            shown = "a value" if isinstance(value, dict) else repr(value)
            raise ConfigError(f"config.json: {field} is {shown}; supported: {supported}")


def decoder_config(raw: RawConfig, architecture: str, **family: Any) -> DecoderConfig:
    """The fields that all families share; `family` holds what one family sets by itself."""
    refuse_unsupported(raw)
    num_heads = raw.integer("num_attention_heads")
    hidden_size = raw.integer("hidden_size")
    values: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": raw.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": raw.integer("intermediate_size"),
        "num_layers": raw.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": raw.integer("num_key_value_heads", num_heads),
        "head_dim": raw.integer("head_dim", hidden_size // num_heads),
        "rms_norm_eps": raw.number("rms_norm_eps", 1e-6),
        "rope_theta": _rope_theta(raw),
        "rope_scaling": _rope_scaling(raw),
        "max_position_embeddings": raw.integer("max_position_embeddings"),
        "sliding_window": None,
        "tie_word_embeddings": raw.flag("tie_word_embeddings"),
        "checkpoint_dtype": _checkpoint_dtype(raw),
    }
    config = DecoderConfig(**(values | family))
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ConfigError(
            f"config.json: num_attention_heads {config.num_heads} must be a multiple of "
            f"num_key_value_heads {config.num_kv_heads}, and head_dim {config.head_dim} even"
        )
    return config


def window_by_layer_types(raw: RawConfig, in_use: bool) -> int | None:
    """The sliding window of families whose layers may use it (`layer_types`, `sliding_window`)."""
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ConfigError(
                f"config.json: layer_types has {sorted(unknown)}; supported: full_attention"
            )
        in_use = "sliding_attention" in layer_types
    return raw.integer("sliding_window") if in_use else None


def _rope_fields(raw: RawConfig) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`, the hub's older files `rope_scaling`."""
    fields = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(fields, dict) or any(isinstance(v, dict) for v in fields.values()):
        raise ConfigError(
            "config.json: rope_parameters must be one flat object; "
            "supported: the same rotary embedding in every layer"
        )
    return fields


def _rope_theta(raw: RawConfig) -> float:
    fields = _rope_fields(raw)
    if "rope_theta" in fields:
        return RawConfig(fields).number("rope_theta")
    return raw.number("rope_theta", 10000.0)


def _rope_scaling(raw: RawConfig) -> Llama3Rope | None:
    fields = _rope_fields(raw)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        if fields.get("partial_rotary_factor", 1) != 1:
            raise ConfigError(
                "config.json: rope_parameters.partial_rotary_factor is "
                f"{fields['partial_rotary_factor']!r}; supported: 1"
            )
        return None
    if kind != "llama3":
        raise ConfigError(f"config.json: rope_type is {kind!r}; supported: default, llama3")
    rope = RawConfig(fields)
    return Llama3Rope(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )


def _checkpoint_dtype(raw: RawConfig) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"config.json: dtype is {name!r}; supported: bfloat16, float16, float32")
    return str(name)
