"""Supported architectures; each is one function over the shared decoder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpuscore.backends.common.architectures.classifiers import ENDING, head_weights, with_classes
from gpuscore.backends.common.architectures.gemma import gemma, gemma2, gemma3
from gpuscore.backends.common.architectures.llama import llama, mistral
from gpuscore.backends.common.architectures.names import MODEL_WEIGHTS, layer_weights
from gpuscore.backends.common.architectures.qwen import qwen2, qwen3, qwen3_moe
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


# Each function reads the configuration of the architecture of this name, which it is given.
_LANGUAGE_MODELS: dict[str, Callable[[RawConfig, str], DecoderConfig]] = {
    "GemmaForCausalLM": gemma,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}
# Architectures whose classification models were compared with transformers'.
_CLASSIFIERS = {
    f"{name}{ENDING}": _LANGUAGE_MODELS[f"{name}ForCausalLM"]
    for name in ("Gemma2", "Llama", "Mistral", "Qwen2", "Qwen3")
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
    language = name.replace(ENDING, "ForCausalLM")
    raw = RawConfig(with_absent(name, raw.fields))
    config, weights = supported[name](raw, language), MODEL_WEIGHTS
    if name in _CLASSIFIERS:
        config, weights = with_classes(config, name, raw), head_weights(weights)
    layers = tuple(layer_weights(config, layer) for layer in range(config.num_layers))
    return Architecture(config, weights, layers, read_storage(raw.fields))
