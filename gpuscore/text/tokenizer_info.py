"""What a model's directory says about its tokenizer beside tokenizer.json, for clients that ask."""

import json
from pathlib import Path
from typing import Any

import msgspec

from gpuscore.errors import ConfigError
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
    config = _read(directory / "tokenizer_config.json")
    model = _read(directory / "config.json")
    special = _read(directory / "special_tokens_map.json") | config
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


def _read(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content
