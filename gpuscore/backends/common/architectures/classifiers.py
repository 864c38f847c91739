"""`*ForSequenceClassification`: a head over classes in place of the head over tokens.

In transformers these architectures share `GenericForSequenceClassification`: `score.weight`
[classes, E] without a bias, applied to the last token's hidden state after the final norm. The LM
head's soft-cap does not apply.
"""

from collections.abc import Mapping
from dataclasses import replace

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.errors import ConfigError

ENDING = "ForSequenceClassification"
BY_DEFAULT = 2  # number of classes for which transformers writes no id2label


def with_classes(config: DecoderConfig, architecture: str, raw: RawConfig) -> DecoderConfig:
    """Return a language model's configuration with a classification head instead.

    The head is never tied to the embedding. A config.json that was derived from a language model's
    may still say so.
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
    """Names of the classes, in the order of the head's rows."""
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
            "supported: equal numbers"
        )
    return tuple(names[str(i)] for i in range(len(names)))


def _is_text(name: str) -> bool:
    """True if a name has no lone surrogates, which JSON can spell but UTF-8 cannot encode."""
    return not any("\ud800" <= char <= "\udfff" for char in name)
