"""What a model's directory says about its tokenizer beside tokenizer.json, for clients that ask."""

from pathlib import Path

import msgspec

from gpuscore.model_files import read_object
from gpuscore.text.tokenizer import TextEncoder

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerInfo(msgspec.Struct):
    """Special tokens as text; None for what the directory does not say."""

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
    """From tokenizer_config.json, then special_tokens_map.json, then config.json's ids.

    Args:
        chat_template: the model's, which has a reader of its own.

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
        # Files write "no limit" as 10^30.
        model_max_length=length if type(length) is int and length < 2**31 else None,
        **tokens,
    )


def token_text(value: object) -> str | None:
    """A token as text, or as an object with its text and flags."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _by_id(value: object, encoder: TextEncoder) -> str | None:
    """The token of an id, or of the first of several."""
    if isinstance(value, list) and value:
        value = value[0]
    return encoder.token_name(value) if type(value) is int and value >= 0 else None
