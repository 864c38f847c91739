"""Reads and checks the rotary embedding (RoPE) that config.json describes."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuscore.backends.common.raw_config import LONGEST, RawConfig
from gpuscore.errors import ConfigError
from gpuscore.models.files import shown
from gpuscore.types.batch import Float32Array


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN's frequency scaling (Peng et al., 2023), as in transformers (`rope_type: yarn`).

    Args:
        factor: divisor of the low frequencies.
        original_length: the longest prompt that the model took before the scaling, in tokens.
        beta_fast, beta_slow: numbers of turns within that length. A pair of columns with more than
            `beta_fast` turns keeps its frequency. One with fewer than `beta_slow` gets the scaled
            frequency. One between them gets a weighted mean of both.
        truncate: round the first and last pair that get a mean to whole numbers.
        attention_factor: cos and sin are multiplied by it.
    """

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float

    def unscaled_weights(self, theta: float, rotated: int) -> Float32Array:
        """Return the weight of each pair's unscaled frequency, 0 to 1, as [rotated / 2].

        `rotated` is the number of columns that the embedding rotates.
        """
        low, high = (
            rotated * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, rotated - 1)
        if low == high:
            high += 0.001
        pairs = np.arange(rotated // 2, dtype=np.float32)
        return 1 - ((pairs - np.float32(low)) / np.float32(high - low)).clip(0, 1)


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding.

    `scaling` is a number for `rope_type: linear`, which divides all positions by it.
    """

    theta: float
    scaling: Llama3Rope | YarnRope | float | None = None


def read_rope(raw: RawConfig, layer_type: str | None = None, theta: float = 10000.0) -> Rope:
    """Read the rotary embedding.

    transformers 5 writes it as `rope_parameters`; older versions wrote `rope_scaling`.

    Args:
        raw: the configuration.
        layer_type: the entry of `rope_parameters` to read, if there is one for each layer type.
        theta: the architecture's default for `rope_theta`.

    Raises:
        ConfigError: the two keys disagree, or one holds a value that is not supported.
    """
    written = {key: raw.get(key) for key in ("rope_parameters", "rope_scaling") if raw.get(key)}
    if layer_type is not None and isinstance(nested := written.get("rope_parameters"), dict):
        written["rope_parameters"] = nested.get(layer_type)
    ropes = [_rope(raw, key, fields, layer_type, theta=theta) for key, fields in written.items()]
    if len(ropes) > 1 and ropes[0] != ropes[1]:
        raise ConfigError(
            "config.json: rope_parameters and rope_scaling differ, and transformers would take the "
            "latter; supported: one of them, or equal values"
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
    return Rope(base.number("rope_theta", theta), _rope_scaling(raw, key, RawConfig(fields)))


# The keys that each rope_type allows besides the type itself and theta.
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast"),
        *("beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def _rope_scaling(
    raw: RawConfig, key: str, rope: RawConfig
) -> Llama3Rope | YarnRope | float | None:
    kind = rope.fields.get("rope_type", rope.fields.get("type", "default"))
    if rope.fields.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(
            f"config.json: {key}.partial_rotary_factor is "
            f"{shown(rope.fields['partial_rotary_factor'])}; supported: 1"
        )
    if kind == "longrope":
        raise ConfigError(
            f"config.json: {key} has rope_type longrope, whose frequencies depend on the length of "
            "the longest prompt in a batch, so an item's score would depend on the other items; "
            f"supported: {', '.join(_ROPE_KEYS)}"
        )
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise ConfigError(
            f"config.json: rope_type is {shown(kind)}; supported: {', '.join(_ROPE_KEYS)}"
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
    factor = rope.number("factor")
    if kind == "dynamic":
        # It only changes prompts over max_position_embeddings, which we refuse.
        return None
    if kind == "linear":
        return factor
    return _llama3(rope) if kind == "llama3" else _yarn(raw, rope)


def _yarn(raw: RawConfig, rope: RawConfig) -> YarnRope:
    factor = rope.number("factor")
    length = rope.integer("original_max_position_embeddings", raw.integer(LONGEST))

    def magnitude(name: str) -> float:
        return 1 if factor <= 1 else 0.1 * rope.number(name, 1.0) * math.log(factor) + 1

    if rope.get("mscale") is not None and rope.get("mscale_all_dim") is not None:
        default = magnitude("mscale") / magnitude("mscale_all_dim")
    else:
        default = magnitude("")
    return YarnRope(
        factor=factor,
        original_length=length,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", default),
    )


def _llama3(rope: RawConfig) -> Llama3Rope:
    low = rope.number("low_freq_factor")
    high = rope.number("high_freq_factor")
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
