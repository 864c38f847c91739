"""Supported architectures; each family is one small file over the shared decoder."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from gpuscore.backends.torch.hf_config import DecoderConfig, RawConfig
from gpuscore.backends.torch.models import llama, mistral, qwen2, qwen3
from gpuscore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Family:
    """A checkpoint's configuration and where its weights are found."""

    config: DecoderConfig
    model_weights: Mapping[str, str]  # our part -> name in the checkpoint
    layer_weights: Mapping[str, str]  # our part -> name below model.layers.{i}.


_FAMILIES: dict[str, ModuleType] = {
    module.ARCHITECTURE: module for module in (llama, mistral, qwen2, qwen3)
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
    return Family(config, module.MODEL_WEIGHTS, module.layer_weights(config))
