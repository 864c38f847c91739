"""`*ForSequenceClassification`: a head over classes in place of the one over tokens.

transformers' head of all these architectures is `GenericForSequenceClassification`: `score.weight`
[classes, E] without a bias, applied to the final norm's hidden state of the last token. A soft-cap
of the LM head is no part of it.
"""

from collections.abc import Mapping
from dataclasses import replace

from gpuscore.backends.common.hf_config import DecoderConfig, RawConfig
from gpuscore.errors import ConfigError

ENDING = "ForSequenceClassification"
BY_DEFAULT = 2  # classes: transformers writes no id2label then


def with_classes(config: DecoderConfig, architecture: str, raw: RawConfig) -> DecoderConfig:
    """The configuration of a language model's architecture, with a classification head.

    The head is never the embedding, whatever a file that was made from a language model's says.
    """
    return replace(
        config,
        architecture=architecture,
        classes=_classes(raw),
        tie_word_embeddings=False,
        final_softcap=None,
    )


def head_weights(model_weights: Mapping[str, str]) -> dict[str, str]:
    return {**model_weights, "lm_head": "score.weight"}


def _classes(raw: RawConfig) -> tuple[str, ...]:
    """Their names, in the order of the head's rows."""
    names = raw.get("id2label")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(raw.integer("num_labels", BY_DEFAULT)))
    if not isinstance(names, dict) or set(names) != {str(i) for i in range(len(names))}:
        raise ConfigError("config.json: id2label must be an object with the keys 0, 1, 2, ...")
    if not names or not all(isinstance(name, str) and _is_text(name) for name in names.values()):
        raise ConfigError("config.json: id2label must hold the name of at least one class")
    count = raw.integer("num_labels", len(names))
    if count != len(names):
        raise ConfigError(
            f"config.json: num_labels is {count} and id2label has {len(names)} names; "
            "supported: as many"
        )
    return tuple(names[str(i)] for i in range(len(names)))


def _is_text(name: str) -> bool:
    """JSON can also spell halves of characters, which no message can carry."""
    return not any("\ud800" <= char <= "\udfff" for char in name)
