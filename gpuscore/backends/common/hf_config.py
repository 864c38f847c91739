"""Read a Hugging Face config.json into the fields that the decoder needs; refuse the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpuscore.backends.common.config_keys import refuse_unsupported
from gpuscore.errors import ConfigError
from gpuscore.models.files import read_object, shown

DTYPES = ("bfloat16", "float16", "float32")

# Largest accepted sizes, several times the sizes of any existing model: a mistyped size is refused
# before anything of that size is allocated. Ids and positions are 32 bit integers.
MOST_OTHERS = 2**31 - 1
MOST = {
    "hidden_size": 2**18,
    "intermediate_size": 2**22,
    "moe_intermediate_size": 2**22,
    "num_hidden_layers": 4096,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "linear_num_key_heads": 2**14,
    "linear_num_value_heads": 2**14,
    "linear_key_head_dim": 2**14,
    "linear_value_head_dim": 2**14,
    "linear_conv_kernel_dim": 2**10,
    "vocab_size": 2**24,
    "num_labels": 2**20,
}
# Accepted range of numbers; float32 loses smaller ones and turns larger ones into infinity.
SMALL, LARGE = 1e-6, 1e9
RANGES = {
    "rms_norm_eps": (1e-15, 1.0),
    "rope_theta": (1.0, 1e15),
    "rope_local_base_freq": (1.0, 1e15),
}


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding. If `scaling` is a number, all positions are divided by it (`linear`)."""

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
class DeltaNet:
    """Linear attention by the gated delta rule (Yang et al., 2024), in place of attention."""

    num_key_heads: int
    num_value_heads: int  # a multiple of the key heads
    key_dim: int  # of a head
    value_dim: int  # of a head
    kernel: int  # tokens that the convolution sees, the row's own included
    layers: tuple[bool, ...]  # which layers have it

    @property
    def convolved(self) -> int:
        """Columns that are convolved: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """All properties in which supported decoders differ."""

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
    window_rope: Rope | None = None  # of layers with a window; None = the same rope
    mixture: Mixture | None = None
    delta_net: DeltaNet | None = None
    rotary_dim: int | None = None  # first numbers of a head that are rotated; None = all
    output_gate: bool = False  # attention's output times the sigmoid of a projection
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    attention_softcap: float | None = None
    final_softcap: float | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    post_norms: bool = False  # norms on the outputs of attention and MLP as well
    one_plus_norms: bool = False  # norm weights are stored minus 1 and applied before rounding
    dtypes: tuple[str, ...] = DTYPES
    classes: tuple[str, ...] | None = None  # of a classification head; None = an LM head

    @property
    def label_rows(self) -> int:
        """Number of rows of the label head."""
        return self.vocab_size if self.classes is None else len(self.classes)

    def is_linear(self, layer: int) -> bool:
        """True if the layer has linear attention, and a state in place of keys and values."""
        return self.delta_net is not None and self.delta_net.layers[layer]

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - (0 if self.delta_net is None else sum(self.delta_net.layers))

    def rope_of(self, layer: int) -> Rope:
        if self.windows[layer] is not None and self.window_rope is not None:
            return self.window_rope
        return self.rope


class RawConfig:
    """config.json with typed access; the error for a missing or mistyped field names it."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    @classmethod
    def read(cls, directory: Path) -> "RawConfig":
        fields = read_object(directory / "config.json")
        if fields is None:
            raise ConfigError(f"{directory} has no config.json: not a Hugging Face model directory")
        return cls(fields)

    def get(self, name: str) -> Any:
        return self.fields.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.fields.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(
                f"config.json: {name} must be a positive integer, found {shown(value)}"
            )
        if value > (most := MOST.get(name, MOST_OTHERS)):
            raise ConfigError(f"config.json: {name} is {value}; supported: at most {most:,}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.fields.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ConfigError(
                f"config.json: {name} must be a positive number, found {shown(value)}"
            )
        least, most = RANGES.get(name, (SMALL, LARGE))
        if not least <= value <= most:
            raise ConfigError(
                f"config.json: {name} is {shown(value)}; supported: {least:g} to {most:g}"
            )
        return float(value)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """Return a number or None: null means None, an absent field means its default."""
        return None if self.fields.get(name, default) is None else self.number(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.fields.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {name} must be true or false, found {shown(value)}")
        return value


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def decoder_config(
    raw: RawConfig,
    architecture: str,
    *,
    tie_word_embeddings: bool = False,
    **own: Any,
) -> DecoderConfig:
    """Read the fields that all architectures share.

    Args:
        raw: the configuration.
        architecture: its name.
        tie_word_embeddings: the architecture's default.
        own: fields that the architecture sets itself.
    """
    refuse_unsupported(architecture, raw.fields)
    num_heads, num_layers = raw.integer("num_attention_heads"), raw.integer("num_hidden_layers")
    hidden_size = raw.integer("hidden_size")
    head_dim = own.pop("head_dim", None) or raw.integer("head_dim", hidden_size // num_heads)
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
    if "rope" not in own:
        values["rope"] = read_rope(raw)
    config = DecoderConfig(**(values | own))
    _check_layer_types(raw, config)
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ConfigError(
            f"config.json: num_attention_heads {config.num_heads} must be a multiple of "
            f"num_key_value_heads {config.num_kv_heads}, and head_dim {config.head_dim} even"
        )
    return config


def _check_layer_types(raw: RawConfig, config: DecoderConfig) -> None:
    """Refuse `layer_types` that differ from what is computed, even if transformers ignores them."""
    computed = [
        LINEAR if config.is_linear(layer) else SLIDING if window else FULL
        for layer, window in enumerate(config.windows)
    ]
    if raw.get("layer_types") not in (None, computed):
        raise ConfigError(
            f"config.json: layer_types is {shown(raw.get('layer_types'))}; transformers does not "
            f"read it for {config.architecture}; supported: {len(computed)} of {computed[0]}"
        )


def layer_windows(raw: RawConfig, by_default: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The sliding window of each layer.

    Args:
        raw: `layer_types` says which layers have one, `sliding_window` how long it is.
        by_default: called with a layer's number if `layer_types` is absent; true = it has one.
    """
    num_layers = raw.integer("num_hidden_layers")
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if by_default(i) else FULL for i in range(num_layers)]
    known = isinstance(kinds, list) and all(kind in (SLIDING, FULL) for kind in kinds)
    if not known or len(kinds) != num_layers:
        raise ConfigError(
            f"config.json: layer_types is {shown(kinds)}; supported: {num_layers} entries "
            f"(num_hidden_layers), each {FULL} or {SLIDING}"
        )
    return tuple(raw.integer("sliding_window") if kind == SLIDING else None for kind in kinds)


def every_layer(raw: RawConfig, windowed: bool) -> tuple[int | None, ...]:
    """The sliding window of each layer in architectures whose layers are all alike."""
    window = raw.integer("sliding_window") if windowed else None
    return (window,) * raw.integer("num_hidden_layers")


def upper_layer_windows(raw: RawConfig) -> tuple[int | None, ...]:
    """Qwen's rule: with `use_sliding_window`, layers from `max_window_layers` on have a window."""
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
    if type(value) is not int or value < 0:
        raise ConfigError(
            f"config.json: max_window_layers must be an integer, found {shown(value)}"
        )
    return value


def read_rope(raw: RawConfig, layer_type: str | None = None, theta: float = 10000.0) -> Rope:
    """The rotary embedding: transformers 5 writes `rope_parameters`, older files `rope_scaling`.

    Args:
        raw: the configuration.
        layer_type: the entry of nested `rope_parameters`, in architectures that have several.
        theta: the architecture's default.

    Raises:
        ConfigError: both keys exist and differ, or one holds something that is not supported.
    """
    written = {key: raw.get(key) for key in ("rope_parameters", "rope_scaling") if raw.get(key)}
    if layer_type is not None and isinstance(nested := written.get("rope_parameters"), dict):
        written["rope_parameters"] = nested.get(layer_type)
    ropes = [_rope(raw, key, fields, layer_type, theta) for key, fields in written.items()]
    if len(ropes) > 1 and ropes[0] != ropes[1]:
        raise ConfigError(
            "config.json: rope_parameters and rope_scaling differ, and transformers would take the "
            "latter; supported: one of them, or both alike"
        )
    return ropes[0] if ropes else Rope(raw.number("rope_theta", theta))


def _rope(raw: RawConfig, key: str, fields: Any, layer_type: str | None, theta: float) -> Rope:
    if not isinstance(fields, dict) or any(isinstance(v, dict) for v in fields.values()):
        raise ConfigError(
            f"config.json: {key} must be one flat object"
            + (f" in {layer_type}" if layer_type else "; supported: the same in every layer")
        )
    base = RawConfig({"rope_theta": fields.get("rope_theta", raw.get("rope_theta"))})
    if "rope_theta" in fields and fields["rope_theta"] is None:
        raise ConfigError(f"config.json: rope_theta in {key} must be a positive number, found None")
    return Rope(base.number("rope_theta", theta), _rope_scaling(key, RawConfig(fields)))


# rope_type -> the keys that it needs besides the type itself and theta.
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def _rope_scaling(key: str, rope: RawConfig) -> Llama3Rope | float | None:
    kind = rope.fields.get("rope_type", rope.fields.get("type", "default"))
    if rope.fields.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(
            f"config.json: {key}.partial_rotary_factor is "
            f"{shown(rope.fields['partial_rotary_factor'])}; supported: 1"
        )
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise ConfigError(
            f"config.json: rope_type is {shown(kind)}; supported: default, linear, llama3"
        )
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_ROPE_KEYS[kind]}
    for name, value in rope.fields.items():
        if name not in known and value is not None:
            raise ConfigError(
                f"config.json: {key} has {shown(name)}, which rope_type {kind} does not; "
                f"supported: {', '.join(sorted(known))}"
            )
    if kind == "default":
        return None
    if kind == "linear":
        return rope.number("factor")
    return _llama3(rope)


def _llama3(rope: RawConfig) -> Llama3Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise ConfigError(
            f"config.json: high_freq_factor {high:g} must be over low_freq_factor {low:g}"
        )
    return Llama3Rope(
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )


def _checkpoint_dtype(raw: RawConfig) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype is {shown(name)}; supported: {', '.join(DTYPES)}")
    return str(name)
