"""Supported architectures; each family is one small file over the shared decoder."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from gpuscore.backends.shared.families import (
    gemma,
    gemma2,
    gemma3,
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from gpuscore.backends.shared.hf_config import DecoderConfig, RawConfig
from gpuscore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Family:
    """A checkpoint's configuration and where its weights are found."""

    config: DecoderConfig
    model_weights: Mapping[str, str]  # our part -> name in the checkpoint
    layer_weights: tuple[Mapping[str, str], ...]  # of each layer: name below model.layers.{i}.


_FAMILIES: dict[str, ModuleType] = {
    module.ARCHITECTURE: module
    for module in (gemma, gemma2, gemma3, llama, mistral, qwen2, qwen3, qwen3_moe)
}


def read_family(raw: RawConfig) -> Family:
    """Raises ConfigError for an architecture or a feature that is not supported."""
    architectures = raw.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name not in _FAMILIES:
        raise ConfigError(
            f"config.json: architectures is {architectures!r}; "
            f"supported: {', '.join(sorted(_FAMILIES))}"
        )
    module = _FAMILIES[name]
    config = module.read_config(raw)
    layers = tuple(module.layer_weights(config, layer) for layer in range(config.num_layers))
    return Family(config, module.MODEL_WEIGHTS, layers)
