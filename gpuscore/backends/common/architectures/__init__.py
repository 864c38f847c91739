"""Supported architectures; each is one function over the shared decoder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpuscore.backends.common.architectures.classifiers import with_classes
from gpuscore.backends.common.architectures.gemma import gemma, gemma2, gemma3
from gpuscore.backends.common.architectures.llama import granite, llama, mistral
from gpuscore.backends.common.architectures.names import MODEL_WEIGHTS, layer_weights
from gpuscore.backends.common.architectures.qwen import qwen2, qwen3, qwen3_moe
from gpuscore.backends.common.architectures.qwen3_5 import qwen3_5, text_tower
from gpuscore.backends.common.config_keys import with_absent
from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.quantization import Storage, read_storage
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.errors import ConfigError
from gpuscore.models.files import PROCESS_REWARD, SEQUENCE, TOKENS, architecture_name, shown
from gpuscore.models.hub import TEXT_TOWERS


@dataclass(frozen=True, slots=True)
class Architecture:
    """A checkpoint's configuration and the names of its tensors."""

    config: DecoderConfig
    model_weights: Mapping[str, str]  # our part -> name in the checkpoint
    layer_weights: tuple[Mapping[str, str], ...]  # per layer; names below {trunk}.layers.{i}.
    trunk: str = "model"  # prefix of all weights' names, except the head's
    unread: tuple[str, ...] = ()  # prefixes of the names of weights that scores do not need
    storage: Storage | None = None  # of quantised linear layers; None = nothing is quantised

    def name(self, layer: int, part: str, expert: int | None = None) -> str:
        """Return the name of the tensor of a part of a layer, or of one of its experts.

        Raises:
            KeyError: the layer has no such part.
        """
        return (
            f"{self.trunk}.layers.{layer}.{self.layer_weights[layer][part].format(expert=expert)}"
        )


# Each function reads the configuration of an architecture, and gets its name.
_LANGUAGE_MODELS: dict[str, Callable[[RawConfig, str], DecoderConfig]] = {
    "GemmaForCausalLM": gemma,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "GraniteForCausalLM": granite,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen3_5,
}
# Architectures whose classification models were compared with transformers'.
_CLASSIFIERS = {
    f"{name}{kind}": _LANGUAGE_MODELS[f"{name}ForCausalLM"]
    for name in ("Gemma2", "Llama", "Mistral", "Qwen2", "Qwen3")
    for kind in (SEQUENCE, TOKENS)
} | {
    f"Qwen3_5{SEQUENCE}": qwen3_5,
    f"Qwen3_5Text{SEQUENCE}": qwen3_5,
    f"Qwen2{PROCESS_REWARD}": qwen2,
}
# A part that predicts further tokens, and the tower of pictures.
_UNREAD = ("mtp.", "model.visual.")
# Qwen2.5-Math-PRM keeps the head of the language model that it was made from.
_UNREAD_HEAD = ("lm_head.",)


# Architectures that people try, and the feature of each that is not supported.
_EXPERTS = "mixtures with a shared expert and its gate"
REFUSED = {
    "Qwen3_5MoeForCausalLM": _EXPERTS,
    "Qwen3_5MoeForConditionalGeneration": _EXPERTS,
    "Qwen3NextForCausalLM": f"{_EXPERTS}, and linear layers whose projections are interleaved",
    "Qwen2MoeForCausalLM": _EXPERTS,
    "MixtralForCausalLM": "a mixture of experts under other names of weights",
    "DeepseekV3ForCausalLM": "attention over compressed keys and values, and shared experts",
    "GptOssForCausalLM": "attention with sinks",
    "GraniteMoeHybridForCausalLM": "layers of Mamba 2",
    "Phi3ForCausalLM": "query, key and value projections in one weight",
    "Olmo2ForCausalLM": "norms after attention and MLP only",
    "Cohere2ForCausalLM": "attention and MLP side by side",
    "Qwen2ForRewardModel": "a reward head of two layers",
    "Qwen3ForGuardModel": "heads that judge every token of a text while it is written",
}


def read_architecture(raw: RawConfig) -> Architecture:
    """Read the configuration; raises ConfigError for an architecture or feature not supported."""
    name = architecture_name(raw.fields)
    supported = _LANGUAGE_MODELS | _CLASSIFIERS
    if name not in supported:
        feature = REFUSED.get(name, "")
        raise ConfigError(
            f"config.json: architectures is {shown(raw.get('architectures'))}"
            f"{feature and f', which has {feature}'}; supported: {', '.join(sorted(supported))}"
        )
    language = f"{name.partition('For')[0]}ForCausalLM" if name in _CLASSIFIERS else name
    fields = text_tower(raw.fields) if name in TEXT_TOWERS else raw.fields
    raw = RawConfig(with_absent(name, fields))
    config = supported[name](raw, language)
    weights = MODEL_WEIGHTS
    if name in _CLASSIFIERS:
        config, head = with_classes(config, name, raw)
        weights = {**weights, **head}
    layers = tuple(layer_weights(config, layer) for layer in range(config.num_layers))
    trunk = "model.language_model" if name in TEXT_TOWERS else "model"
    below = {part: name.replace("model.", f"{trunk}.", 1) for part, name in weights.items()}
    unread: tuple[str, ...] = _UNREAD if config.delta_net is not None else ()
    if name.endswith(PROCESS_REWARD):
        unread = _UNREAD_HEAD
    storage = read_storage(raw.fields)
    return Architecture(config, below, layers, trunk, unread=unread, storage=storage)
