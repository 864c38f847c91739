"""Reads a Hugging Face config.json into the fields that the decoder needs, and refuses the rest."""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpuscore.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding; a `scaling` that is a number divides all positions (`linear`)."""

    theta: float
    scaling: Llama3Rope | float | None = None


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts in place of the MLP of some layers."""

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_top_k: bool  # the chosen experts' weights sum to 1
    layers: tuple[bool, ...]  # which layers have it


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
    rope: Rope
    max_position_embeddings: int
    windows: tuple[int | None, ...]  # per layer: keys a token sees, itself included; None = all
    tie_word_embeddings: bool
    checkpoint_dtype: str
    attention_scale: float
    window_rope: Rope | None = None  # of layers with a window, where it is another one
    mixture: Mixture | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    attention_softcap: float | None = None
    final_softcap: float | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    post_norms: bool = False  # norms on the outputs of attention and MLP as well
    one_plus_norms: bool = False  # norm weights are stored less 1 and applied before rounding
    dtypes: tuple[str, ...] = DTYPES
    classes: tuple[str, ...] | None = None  # of a classification head in place of the LM head

    @property
    def label_rows(self) -> int:
        """Rows of the head."""
        return self.vocab_size if self.classes is None else len(self.classes)

    def rope_of(self, layer: int) -> Rope:
        if self.windows[layer] is not None and self.window_rope is not None:
            return self.window_rope
        return self.rope


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

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """null means none; only a field that is absent means its default."""
        return None if self.fields.get(name, default) is None else self.number(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.fields.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {name} must be true or false, found {value!r}")
        return value


FULL, SLIDING = "full_attention", "sliding_attention"

# Fields that change what a model computes in ways the decoder does not know:
# (field, values that are harmless, what is supported).
REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("quantization_config", (None,), "unquantised bfloat16, float16 or float32 weights"),
    ("auto_map", (None, {}), "models without remote code"),
    ("is_causal", (None, True), "causal models"),
    ("use_bidirectional_attention", (None, False), "causal models"),
    ("hidden_act", (None, "silu"), "silu"),
    ("partial_rotary_factor", (None, 1, 1.0), "rotary embedding over the whole head"),
    ("attn_logit_softcapping", (None,), "attention without a soft-cap"),
    ("final_logit_softcapping", (None,), "logits without a soft-cap"),
    ("pretraining_tp", (None, 1), "pretraining_tp 1"),
)


def refuse_unsupported(raw: RawConfig, reads: Collection[str] = ()) -> None:
    """Raise ConfigError, naming the field, for anything that would be computed wrongly.

    `reads` names fields that the family itself reads.
    """
    for field, harmless, supported in REFUSED:
        value = raw.get(field)
        if field not in reads and value not in harmless:
            shown = "a value" if isinstance(value, dict) else repr(value)
            raise ConfigError(f"config.json: {field} is {shown}; supported: {supported}")


def decoder_config(
    raw: RawConfig,
    architecture: str,
    *,
    reads: Collection[str] = (),
    tie_word_embeddings: bool = False,
    **family: Any,
) -> DecoderConfig:
    """The fields that all families share.

    Args:
        reads: fields that the family reads by itself, though others must not have them.
        tie_word_embeddings: the family's default.
        family: what the family sets by itself.
    """
    refuse_unsupported(raw, reads)
    num_heads, num_layers = raw.integer("num_attention_heads"), raw.integer("num_hidden_layers")
    hidden_size = raw.integer("hidden_size")
    head_dim = family.pop("head_dim", None) or raw.integer("head_dim", hidden_size // num_heads)
    values: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": raw.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": raw.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": raw.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": raw.number("rms_norm_eps", 1e-6),
        "max_position_embeddings": raw.integer("max_position_embeddings"),
        "windows": (None,) * num_layers,
        "tie_word_embeddings": raw.flag("tie_word_embeddings", tie_word_embeddings),
        "checkpoint_dtype": _checkpoint_dtype(raw),
        "attention_scale": head_dim**-0.5,
    }
    if "rope" not in family:
        values["rope"] = read_rope(raw)
    config = DecoderConfig(**(values | family))
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ConfigError(
            f"config.json: num_attention_heads {config.num_heads} must be a multiple of "
            f"num_key_value_heads {config.num_kv_heads}, and head_dim {config.head_dim} even"
        )
    return config


def layer_windows(raw: RawConfig, by_default: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The sliding window of each layer.

    Args:
        raw: `layer_types` says which layers have one, `sliding_window` how long it is.
        by_default: whether layer i has one where `layer_types` is absent.
    """
    num_layers = raw.integer("num_hidden_layers")
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if by_default(i) else FULL for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {SLIDING, FULL}:
        raise ConfigError(
            f"config.json: layer_types is {kinds!r}; supported: {num_layers} entries "
            f"(num_hidden_layers), each {FULL} or {SLIDING}"
        )
    return tuple(raw.integer("sliding_window") if kind == SLIDING else None for kind in kinds)


def upper_layer_windows(raw: RawConfig) -> tuple[int | None, ...]:
    """Qwen's rule: with `use_sliding_window`, the layers from `max_window_layers` on."""
    in_use = raw.flag("use_sliding_window")
    windows = layer_windows(raw, lambda i: in_use and i >= _window_start(raw))
    if any(windows) and not in_use:
        raise ConfigError(
            "config.json: layer_types asks for a sliding window and use_sliding_window is false; "
            "supported: both or neither"
        )
    return windows


def _window_start(raw: RawConfig) -> int:
    value = raw.fields.get("max_window_layers", 28)
    if not isinstance(value, int) or value < 0:
        raise ConfigError(f"config.json: max_window_layers must be an integer, found {value!r}")
    return value


def read_rope(raw: RawConfig, layer_type: str | None = None, theta: float = 10000.0) -> Rope:
    """The rotary embedding: transformers 5 writes `rope_parameters`, older files `rope_scaling`.

    Args:
        raw: the configuration.
        layer_type: which entry of nested `rope_parameters`, in families that have several.
        theta: the family's default.
    """
    fields = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if layer_type is not None:
        fields = fields.get(layer_type) if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or any(isinstance(v, dict) for v in fields.values()):
        raise ConfigError(
            "config.json: rope_parameters must be one flat object"
            + (f" in {layer_type}" if layer_type else "; supported: the same in every layer")
        )
    base = RawConfig({"rope_theta": fields.get("rope_theta", raw.get("rope_theta"))})
    return Rope(base.number("rope_theta", theta), _rope_scaling(RawConfig(fields)))


def _rope_scaling(rope: RawConfig) -> Llama3Rope | float | None:
    kind = rope.fields.get("rope_type", rope.fields.get("type", "default"))
    if rope.fields.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(
            "config.json: rope_parameters.partial_rotary_factor is "
            f"{rope.fields['partial_rotary_factor']!r}; supported: 1"
        )
    if kind == "default":
        return None
    if kind == "linear":
        return rope.number("factor")
    if kind != "llama3":
        raise ConfigError(f"config.json: rope_type is {kind!r}; supported: default, linear, llama3")
    return Llama3Rope(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )


def _checkpoint_dtype(raw: RawConfig) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype is {name!r}; supported: {', '.join(DTYPES)}")
    return str(name)
