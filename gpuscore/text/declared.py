"""Reads the files beside tokenizer.json, so that token ids are the same as transformers'.

gpuscore tokenises by tokenizer.json. transformers also reads tokenizer_config.json,
special_tokens_map.json and added_tokens.json, whose entries can add tokens or change how tokens are
found. If they would change ids, the model is refused (`check_same_ids`). The other keys change no
ids: if there is a tokenizer.json, transformers ignores `add_bos_token`, `add_eos_token` and
`legacy` of tokenizer_config.json; the rest is about padding, truncation and decoding.

For some classes in tokenizer_config.json, transformers takes only the vocabulary from
tokenizer.json, and the rest from the class (`rebuild`). LlamaTokenizer uses Metaspace and no
normalizer, so white space gets no prefix after a special token. Qwen2Tokenizer uses NFC and one
pattern. Here the tokenizer gets the normalizer and the Metaspace of its class, so that the ids are
the same. If it differs from its class in anything else, the model is refused.
"""

import json
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from gpuscore.errors import ConfigError
from gpuscore.models.files import as_object, read_object, shown
from gpuscore.text.boundaries import flat
from gpuscore.text.pretokens import META

_FLAGS = ("lstrip", "rstrip", "single_word")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_ENDS = ("bos_token", "eos_token")
# Classes whose pre-tokenizer takes `add_prefix_space` from tokenizer_config.json.
_REBUILT = ("Qwen2Tokenizer", "Qwen2TokenizerFast")


def check_same_ids(directory: Path, tokenizer: Tokenizer) -> None:
    """Raise ConfigError, naming file and key, if transformers would produce other ids.

    Args:
        directory: the model's directory.
        tokenizer: read from tokenizer.json.
    """
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    path = directory / "tokenizer_config.json"
    config = read_object(path) or {}
    if config.get("split_special_tokens"):
        raise ConfigError(
            f"{path}: split_special_tokens is {shown(config['split_special_tokens'])}; supported: "
            "false"
        )
    if dropout := getattr(tokenizer.model, "dropout", None):
        raise ConfigError(
            f"{directory / 'tokenizer.json'}: dropout is {dropout}, which makes ids random; "
            "supported: null or 0"
        )
    if config.get("add_prefix_space") is True and config.get("tokenizer_class") in _REBUILT:
        _check_prefix(path, tokenizer)
    for token in as_object(config.get("added_tokens_decoder") or {}, str(path)).values():
        _check_added((path, "added_tokens_decoder"), token, known, tokenizer)
    for file in (path, directory / "special_tokens_map.json", directory / "added_tokens.json"):
        for key, token in _declared(file):
            if file != path and key in config:
                continue  # tokenizer_config.json overrides the other files
            _check_added((file, key), token, known, tokenizer)


def named_tokens(directory: Path) -> frozenset[str | int]:
    """Return the control tokens that files beside tokenizer.json name, as texts and ids.

    They come from tokenizer_config.json and special_tokens_map.json, and from the ids of bos and
    eos in config.json and generation_config.json. The unknown token (unk_token) is left out, unless
    it is also the bos or eos token.
    """
    tokens: list[tuple[str, object]] = []
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        tokens += _declared(directory / file)
    config = read_object(directory / "tokenizer_config.json") or {}
    decoder = as_object(config.get("added_tokens_decoder") or {}, "added_tokens_decoder")
    tokens += [
        ("special", token)
        for token in decoder.values()
        if isinstance(token, dict) and token.get("special")
    ]
    texts = [(key, token_text(token)) for key, token in tokens]
    unknown = {text for key, text in texts if key == "unk_token"}
    named: set[str | int] = {
        text for key, text in texts if text and (key in _ENDS or text not in unknown)
    }
    for file in ("config.json", "generation_config.json"):
        values = read_object(directory / file) or {}
        for key in _ENDS:
            value = values.get(f"{key}_id")
            ids = value if isinstance(value, list) else [value]
            named.update(id for id in ids if type(id) is int)
    return frozenset(named)


def token_text(value: object) -> str | None:
    """Return the text of a token, which files write as a text, or as an object with flags."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _declared(path: Path) -> Iterator[tuple[str, object]]:
    """Yield (key, token) for each special token that a file declares."""
    config = read_object(path) or {}
    if path.name == "added_tokens.json":  # token -> id
        yield from ((key, key) for key in config)
        return
    for key, value in config.items():
        if key in _LISTS:
            if not isinstance(value, dict | list | None):
                raise ConfigError(f"{path}: {key} must hold tokens, found {shown(value)}")
            tokens = value.values() if isinstance(value, dict) else value or ()
            yield from ((key, token) for token in tokens)
        elif path.name == "special_tokens_map.json" and _is_setting(key):
            # transformers would use it, even a setting that it ignores in tokenizer_config.json.
            raise ConfigError(f"{path} has {shown(key)}; supported: special tokens")
        elif isinstance(value, str | dict) and not _is_setting(key):
            yield key, value


def _is_setting(key: str) -> bool:
    return not key.endswith("_token") or key.startswith("add_")


def _check_added(
    place: tuple[Path, str], token: object, known: Mapping[str, AddedToken], tokenizer: Tokenizer
) -> None:
    path, key = place
    flags = token if isinstance(token, dict) else {"content": token}
    content = flags.get("content")
    if not isinstance(content, str):
        raise ConfigError(f"{path}: {key} holds {shown(token)}, which is not a token")
    added = known.get(content)
    if added is None:
        raise ConfigError(
            f"{path}: {key} holds {shown(content)}, which tokenizer.json does not have among its "
            "added tokens; supported: tokens that both files have"
        )
    if not isinstance(token, dict):
        return
    for flag in (*_FLAGS, "normalized") if _depends_on_normalizer(tokenizer, content) else _FLAGS:
        if flag in flags and bool(flags[flag]) != getattr(added, flag):
            raise ConfigError(
                f"{path}: {key} says that {flag} of {shown(content)} is {shown(flags[flag])}, but "
                f"tokenizer.json says {getattr(added, flag)}; supported: the same in both files"
            )


def _depends_on_normalizer(tokenizer: Tokenizer, content: str) -> bool:
    """Return True if normalisation can change whether a text contains a token.

    NFC cannot, unless it changes the token itself.
    """
    stages = flat(tokenizer.normalizer, "normalizers")
    if stages is None or any(stage["type"] != "NFC" for stage in stages):
        return True
    return bool(stages) and unicodedata.normalize("NFC", content) != content


def _check_prefix(path: Path, tokenizer: Tokenizer) -> None:
    parts = flat(tokenizer.pre_tokenizer, "pretokenizers") or ()
    if any(part.get("add_prefix_space") is False for part in parts):
        raise ConfigError(
            f"{path}: add_prefix_space is true, and false in tokenizer.json; supported: the same "
            "in both files"
        )


_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MODEL_FLAGS = ("fuse_unk", "byte_fallback", "ignore_merges")


def rebuild(directory: Path, tokenizer: Tokenizer) -> None:
    """Change a tokenizer as its class in transformers would.

    Raises:
        ConfigError: tokenizer.json is for another class, so that ids would differ.
    """
    path = directory / "tokenizer_config.json"
    config = read_object(path) or {}
    name = config.get("tokenizer_class")
    kind = (read_object(directory / "config.json") or {}).get("model_type")
    if not isinstance(name, str):
        return
    stages = flat(tokenizer.pre_tokenizer, "pretokenizers") or []
    if name.removesuffix("Fast") == "Qwen2Tokenizer" or kind == "qwen2":
        if (description := _describe(tokenizer)) != ("BPE", [False] * 3, [_QWEN2, "ByteLevel"]):
            raise ConfigError(
                f"{path}: for tokenizer_class {name} transformers uses Qwen2's pattern, but "
                f"tokenizer.json has {shown(description)}; supported: Qwen2's pattern"
            )
        tokenizer.normalizer = normalizers.NFC()
    elif name.removesuffix("Fast") == "LlamaTokenizer" and kind != "mistral":
        if any(stage["type"] == "ByteLevel" for stage in stages):
            return  # transformers takes tokenizer.json as it is
        if _describe(tokenizer)[:2] != ("BPE", [True, True, False]):
            raise ConfigError(
                f"{path}: tokenizer_class {name} uses BPE with fuse_unk and byte_fallback, but "
                f"tokenizer.json has {shown(_describe(tokenizer)[:2])}; supported: such a BPE"
            )
        first = "always" if config.get("legacy") else "first"
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=META,
            prepend_scheme="never" if config.get("add_prefix_space") is False else first,
            split=False,
        )


def _describe(tokenizer: Tokenizer) -> tuple[str, list[bool], list[Any]]:
    """Return the model's type and flags, and the patterns and other stages."""
    model = tokenizer.model
    flags = [getattr(model, flag, False) for flag in _MODEL_FLAGS]
    stages = [
        stage["pattern"].get("Regex", stage)
        if stage["type"] == "Split" and (stage["behavior"], stage["invert"]) == ("Isolated", False)
        else stage["type"] + (" with a regex" if stage.get("use_regex") else "")
        for stage in flat(tokenizer.pre_tokenizer, "pretokenizers") or []
    ]
    kind = "BPE" if isinstance(model, models.BPE) else type(model).__name__
    return kind, flags, stages


def continuing(tokenizer: Tokenizer) -> Tokenizer | None:
    """Return a copy of a tokenizer for the later parts of a prompt; None if it is not needed.

    Metaspace can add a prefix at the beginning of a text only. A prompt that is divided at control
    tokens has one beginning, so its later parts must not get the prefix.
    """
    state = json.loads(tokenizer.to_str())
    stage = state["pre_tokenizer"] or {}
    stages = stage.get("pretokenizers", [stage])
    first = [part for part in stages if part.get("prepend_scheme") == "first"]
    for part in first:
        part["prepend_scheme"] = "never"
    if not first:
        return None
    changed = Tokenizer.from_str(json.dumps(state))
    changed.encode_special_tokens = tokenizer.encode_special_tokens
    return changed
