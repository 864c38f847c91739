"""Reads a Hugging Face config.json into the fields that the decoder needs; refuses the rest."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from gpuscore.backends.common.config_keys import refuse_unsupported
from gpuscore.backends.common.raw_config import LONGEST, RawConfig
from gpuscore.backends.common.ropes import Rope, YarnRope, read_rope
from gpuscore.errors import ConfigError
from gpuscore.models.files import shown

DTYPES = ("bfloat16", "float16", "float32")
BIAS_COLUMNS = 8  # of a label head with a bias: the first holds it, the others keep rows aligned


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
    stream_divisor: float = 1.0  # divides the scaled embeddings, the first residual stream
    logits_divisor: float = 1.0  # a power of two; the final norm's weight is divided by it
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
    head_parts: tuple[str, ...] = ("lm_head",)

    @property
    def label_rows(self) -> int:
        """Number of rows of the label head."""
        return self.vocab_size if self.classes is None else len(self.classes)

    @property
    def head_width(self) -> int:
        """Number of columns of the label head, with those of the bias."""
        return self.hidden_size + (BIAS_COLUMNS if "lm_head_bias" in self.head_parts else 0)

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


FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"


def decoder_config(
    raw: RawConfig,
    architecture: str,
    *,
    tie_word_embeddings: bool = False,
    **overrides: Any,
) -> DecoderConfig:
    """Read the fields that all architectures share.

    Args:
        raw: the configuration.
        architecture: its name.
        tie_word_embeddings: the architecture's default.
        overrides: fields that the architecture sets itself.
    """
    refuse_unsupported(architecture, raw.fields)
    num_heads = raw.integer("num_attention_heads")
    num_layers = raw.integer("num_hidden_layers")
    hidden_size = raw.integer("hidden_size")
    head_dim = overrides.pop("head_dim", None) or raw.integer("head_dim", hidden_size // num_heads)
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
        "max_position_embeddings": raw.integer(LONGEST),
        "windows": (None,) * num_layers,
        "tie_word_embeddings": raw.flag("tie_word_embeddings", tie_word_embeddings),
        "checkpoint_dtype": _checkpoint_dtype(raw),
        "attention_scale": head_dim**-0.5,
    }
    if "rope" not in overrides:
        values["rope"] = read_rope(raw)
    config = _with_yarn(DecoderConfig(**(values | overrides)))
    _check_layer_types(raw, config)
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ConfigError(
            f"config.json: num_attention_heads {config.num_heads} must be a multiple of "
            f"num_key_value_heads {config.num_kv_heads}, and head_dim {config.head_dim} even"
        )
    return config


def _with_yarn(config: DecoderConfig) -> DecoderConfig:
    """Return the configuration with YaRN's length, and its factor moved into the attention scale.

    YaRN multiplies cos and sin of both queries and keys by it, so the scores get its square.
    """
    scaling = config.rope.scaling
    if not isinstance(scaling, YarnRope):
        return config
    if config.window_rope is not None or config.rotary_dim is not None:
        raise ConfigError(
            f"config.json: rope_type 'yarn' is not supported for {config.architecture}, because "
            "its factor of cos and sin would reach only a part of the numbers"
        )
    return replace(
        config,
        attention_scale=config.attention_scale * scaling.attention_factor**2,
        max_position_embeddings=max(
            config.max_position_embeddings, int(scaling.factor * scaling.original_length)
        ),
    )


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
    """Return the sliding window of each layer; None = it has none.

    Args:
        raw: `layer_types` says which layers have one, `sliding_window` how long it is.
        by_default: if `layer_types` is absent, says whether the layer of a number has one.
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
    """Return the sliding window of each layer, which is the same in all layers."""
    window = raw.integer("sliding_window") if windowed else None
    return (window,) * raw.integer("num_hidden_layers")


def upper_layer_windows(raw: RawConfig) -> tuple[int | None, ...]:
    """As Qwen does: with `use_sliding_window`, layers from `max_window_layers` on have a window."""
    in_use = raw.flag("use_sliding_window")
    windows = layer_windows(raw, lambda i: in_use and i >= _window_start(raw))
    if any(windows) and not in_use:
        raise ConfigError(
            "config.json: layer_types has a sliding window, but use_sliding_window is false; "
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


def _checkpoint_dtype(raw: RawConfig) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype is {shown(name)}; supported: {', '.join(DTYPES)}")
    return str(name)
