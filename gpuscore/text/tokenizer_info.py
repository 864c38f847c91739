"""Settings of a model's tokenizer, for /tokenizer_info."""

from pathlib import Path

import msgspec

from gpuscore.models.files import read_object
from gpuscore.text.declared import token_text
from gpuscore.text.tokenizer import TextEncoder

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerInfo(msgspec.Struct):
    """Special tokens as text, and other settings; None for settings that no file has."""

    tokenizer_class: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int | None


def read_tokenizer_info(
    directory: Path, encoder: TextEncoder, chat_template: str | None
) -> TokenizerInfo:
    """Read tokenizer_config.json, then special_tokens_map.json, then the ids in config.json.

    Args:
        directory: the model's directory.
        encoder: gives the text of a token id.
        chat_template: the model's chat template, read elsewhere.

    Raises:
        ConfigError: one of these files is not a JSON object.
    """
    config = read_object(directory / "tokenizer_config.json") or {}
    model = read_object(directory / "config.json") or {}
    special = (read_object(directory / "special_tokens_map.json") or {}) | config
    tokens = {
        name: token_text(special.get(name)) or _by_id(model.get(f"{name}_id"), encoder)
        for name in SPECIAL_TOKENS
    }
    length = config.get("model_max_length")
    return TokenizerInfo(
        tokenizer_class=token_text(config.get("tokenizer_class")),
        chat_template=chat_template,
        # Some files have 10^30, which means no limit.
        model_max_length=length if type(length) is int and length < 2**31 else None,
        **tokens,
    )


def _by_id(value: object, encoder: TextEncoder) -> str | None:
    """Return the text of a token id, or of the first id in a list."""
    if isinstance(value, list) and value:
        value = value[0]
    return encoder.token_name(value) if type(value) is int and value >= 0 else None
