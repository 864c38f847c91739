"""Heads over classes in place of the head over tokens, applied to hidden states after the final
norm. The LM head's soft-cap does not apply.

    *ForSequenceClassification      `score` [classes, E] without a bias, read at the last token
    *ForTokenClassification         `score` with a bias, read at any token
    Qwen2ForProcessRewardModel      two layers with biases and a ReLU between them, 2 classes, read
                                    at the token after each step of an answer

The first two are transformers' generic classes, the last is the remote code of Qwen2.5-Math-PRM.
"""

from dataclasses import replace

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.errors import ConfigError
from gpuscore.models.files import PROCESS_REWARD, SEQUENCE, TOKENS

# The tensors of each kind of head, by part.
HEADS = {
    SEQUENCE: {"lm_head": "score.weight"},
    TOKENS: {"lm_head": "score.weight", "lm_head_bias": "score.bias"},
    PROCESS_REWARD: {
        "head_inner": "score.0.weight",
        "head_inner_bias": "score.0.bias",
        "lm_head": "score.2.weight",
        "lm_head_bias": "score.2.bias",
    },
}
BY_DEFAULT = 2  # number of classes for which transformers writes no id2label


def with_classes(
    config: DecoderConfig, architecture: str, raw: RawConfig
) -> tuple[DecoderConfig, dict[str, str]]:
    """Return a language model's configuration with a classification head instead, and the names of
    the head's tensors by part.

    The head is never tied to the embedding. A config.json that was derived from a language model's
    may still say so.
    """
    kind = architecture[architecture.index("For") :]
    if kind == TOKENS and not raw.flag("token_classification_bias", True):
        kind = SEQUENCE
    classifier = replace(
        config,
        architecture=architecture,
        classes=_classes(raw),
        head_parts=tuple(HEADS[kind]),
        tie_word_embeddings=False,
        final_softcap=None,
    )
    return classifier, HEADS[kind]


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
