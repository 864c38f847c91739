"""Supported architectures; each is one small file over the shared decoder."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from gpuscore.backends.common.architectures import (
    gemma,
    gemma2,
    gemma3,
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from gpuscore.backends.common.architectures.classifiers import ENDING, head_weights, with_classes
from gpuscore.backends.common.config_keys import with_absent
from gpuscore.backends.common.hf_config import DecoderConfig, RawConfig
from gpuscore.backends.common.quantization import Storage, read_storage
from gpuscore.errors import ConfigError
from gpuscore.models.files import shown


@dataclass(frozen=True, slots=True)
class Architecture:
    """A checkpoint's configuration and the names of its tensors."""

    config: DecoderConfig
    model_weights: Mapping[str, str]  # our part -> name in the checkpoint
    layer_weights: tuple[Mapping[str, str], ...]  # per layer; names below model.layers.{i}.
    storage: Storage | None = None  # of quantised linear layers; None = nothing is quantised


_LANGUAGE_MODELS: dict[str, ModuleType] = {
    module.ARCHITECTURE: module
    for module in (gemma, gemma2, gemma3, llama, mistral, qwen2, qwen3, qwen3_moe)
}
# Architectures whose classification models were compared with transformers'.
_CLASSIFIERS: dict[str, ModuleType] = {
    module.ARCHITECTURE.replace("ForCausalLM", ENDING): module
    for module in (gemma2, llama, mistral, qwen2, qwen3)
}


def read_architecture(raw: RawConfig) -> Architecture:
    """Read the configuration; raises ConfigError for an architecture or feature not supported."""
    architectures = raw.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    supported = _LANGUAGE_MODELS | _CLASSIFIERS
    if not isinstance(name, str) or name not in supported:
        raise ConfigError(
            f"config.json: architectures is {shown(architectures)}; "
            f"supported: {', '.join(sorted(supported))}"
        )
    module, raw = supported[name], RawConfig(with_absent(name, raw.fields))
    config, weights = module.read_config(raw), module.MODEL_WEIGHTS
    if name in _CLASSIFIERS:
        config, weights = with_classes(config, name, raw), head_weights(weights)
    layers = tuple(module.layer_weights(config, layer) for layer in range(config.num_layers))
    return Architecture(config, weights, layers, read_storage(raw.fields))
