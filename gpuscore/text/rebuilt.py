"""Tokenizers that transformers builds from the vocabulary of tokenizer.json only.

The class that tokenizer_config.json names decides. LlamaTokenizer has Metaspace in the place of any
normalizer, so white space gets no prefix after a special token. Qwen2Tokenizer has NFC and one
pattern. Normalizers and Metaspace are changed to theirs, so that the ids are the same; what differs
in anything else is refused.
Other classes here take tokenizer.json as it is.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from gpuscore.errors import ConfigError
from gpuscore.models.files import read_object, shown
from gpuscore.text.boundaries import flat
from gpuscore.text.pretokens import META

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FLAGS = ("fuse_unk", "byte_fallback", "ignore_merges")


def rebuild(directory: Path, tokenizer: Tokenizer) -> None:
    """Change a model's tokenizer as the class does that transformers would use.

    Raises:
        ConfigError: the class would give other ids, and tokenizer.json is for another one.
    """
    path = directory / "tokenizer_config.json"
    config = read_object(path) or {}
    name = config.get("tokenizer_class")
    kind = (read_object(directory / "config.json") or {}).get("model_type")
    if not isinstance(name, str):
        return
    stages = flat(tokenizer.pre_tokenizer, "pretokenizers") or []
    if name.removesuffix("Fast") == "Qwen2Tokenizer" or kind == "qwen2":
        if (found := _described(tokenizer)) != ("BPE", [False] * 3, [_QWEN2, "ByteLevel"]):
            raise ConfigError(
                f"{path}: for tokenizer_class {name} transformers has Qwen2's pattern; "
                f"tokenizer.json has {shown(found)}; supported: both alike"
            )
        tokenizer.normalizer = normalizers.NFC()
    elif name.removesuffix("Fast") == "LlamaTokenizer" and kind != "mistral":
        if any(stage["type"] == "ByteLevel" for stage in stages):
            return  # transformers takes tokenizer.json as it is
        if _described(tokenizer)[:2] != ("BPE", [True, True, False]):
            raise ConfigError(
                f"{path}: tokenizer_class {name} has BPE with fuse_unk and byte_fallback; "
                f"tokenizer.json has {shown(_described(tokenizer)[:2])}; supported: both alike"
            )
        first = "always" if config.get("legacy") else "first"
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=META,
            prepend_scheme="never" if config.get("add_prefix_space") is False else first,
            split=False,
        )


def _described(tokenizer: Tokenizer) -> tuple[str, list[bool], list[Any]]:
    """Return the model's type and flags, and the patterns and other stages."""
    model = tokenizer.model
    flags = [getattr(model, flag, False) for flag in _FLAGS]
    stages = [
        stage["pattern"].get("Regex", stage)
        if stage["type"] == "Split" and (stage["behavior"], stage["invert"]) == ("Isolated", False)
        else stage["type"] + (" with a regex" if stage.get("use_regex") else "")
        for stage in flat(tokenizer.pre_tokenizer, "pretokenizers") or []
    ]
    kind = "BPE" if isinstance(model, models.BPE) else type(model).__name__
    return kind, flags, stages


def continuing(tokenizer: Tokenizer) -> Tokenizer | None:
    """Return a copy for text after other text; None if that makes no difference.

    Metaspace can give a prefix to the beginning of a text only. A prompt that is divided at a
    control token has one beginning.
    """
    state = json.loads(tokenizer.to_str())
    stage = state["pre_tokenizer"] or {}
    stages = stage.get("pretokenizers", [stage])
    first = [part for part in stages if part.get("prepend_scheme") == "first"]
    for part in first:
        part["prepend_scheme"] = "never"
    if not first:
        return None
    made = Tokenizer.from_str(json.dumps(state))
    made.encode_special_tokens = tokenizer.encode_special_tokens
    return made
