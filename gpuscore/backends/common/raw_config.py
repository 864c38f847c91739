"""The only typed reader of config.json's fields."""

from pathlib import Path
from typing import Any

from gpuscore.errors import ConfigError
from gpuscore.models.files import read_object, shown

LONGEST = "max_position_embeddings"

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
SMALL = 1e-6
LARGE = 1e9
RANGES = {
    "rms_norm_eps": (1e-15, 1.0),
    "rope_theta": (1.0, 1e15),
    "rope_local_base_freq": (1.0, 1e15),
}


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
