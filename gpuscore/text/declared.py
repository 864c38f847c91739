"""The configuration beside tokenizer.json: settings that are used here, and refused settings.

Here tokenizer.json decides how a text is tokenised. transformers also reads tokenizer_config.json,
special_tokens_map.json and added_tokens.json, whose entries can add tokens or change how tokens are
found. Its ids would then differ from ours, so such a model is refused. The other keys change no
ids: if there is a tokenizer.json, transformers ignores `add_bos_token`, `add_eos_token` and
`legacy` of tokenizer_config.json; the rest concerns padding, truncation and decoding.

But transformers builds some tokenizers from the vocabulary of tokenizer.json only (`rebuild`). The
class that tokenizer_config.json names decides. LlamaTokenizer has Metaspace in the place of any
normalizer, so white space gets no prefix after a special token. Qwen2Tokenizer has NFC and one
pattern. Normalizers and Metaspace are changed to theirs, so that the ids are the same; what differs
in anything else is refused. Other classes here take tokenizer.json as it is.
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
# Classes that rebuild their pre-tokenizer with the `add_prefix_space` of the configuration.
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
    eos in config.json and generation_config.json. The unknown token counts only if it has another
    name, too.
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
    """Return the text of a token that a file has as text, or as an object with text and flags."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _declared(path: Path) -> Iterator[tuple[str, object]]:
    """Yield (key, token) for every special token of a file."""
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
            # transformers takes it as a setting, even one that it ignores in tokenizer_config.json.
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
    same = known.get(content)
    if same is None:
        raise ConfigError(
            f"{path}: {key} holds {shown(content)}, which tokenizer.json does not have among its "
            "added tokens; supported: tokens that both files have"
        )
    if not isinstance(token, dict):
        return
    for flag in (*_FLAGS, "normalized") if _changes(tokenizer, content) else _FLAGS:
        if flag in flags and bool(flags[flag]) != getattr(same, flag):
            raise ConfigError(
                f"{path}: {key} says that {flag} of {shown(content)} is {shown(flags[flag])}, but "
                f"tokenizer.json says {getattr(same, flag)}; supported: the same in both files"
            )


def _changes(tokenizer: Tokenizer, content: str) -> bool:
    """Return True if a token may be found in other texts once they are normalised.

    NFC changes no text that has the token, unless it changes the token's own text.
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
    """Change a model's tokenizer as transformers' class for it does.

    Raises:
        ConfigError: the class would give other ids: tokenizer.json is for another class.
    """
    path = directory / "tokenizer_config.json"
    config = read_object(path) or {}
    name = config.get("tokenizer_class")
    kind = (read_object(directory / "config.json") or {}).get("model_type")
    if not isinstance(name, str):
        return
    stages = flat(tokenizer.pre_tokenizer, "pretokenizers") or []
    if name.removesuffix("Fast") == "Qwen2Tokenizer" or kind == "qwen2":
        if (described := _described(tokenizer)) != ("BPE", [False] * 3, [_QWEN2, "ByteLevel"]):
            raise ConfigError(
                f"{path}: for tokenizer_class {name} transformers uses Qwen2's pattern, but "
                f"tokenizer.json has {shown(described)}; supported: Qwen2's pattern"
            )
        tokenizer.normalizer = normalizers.NFC()
    elif name.removesuffix("Fast") == "LlamaTokenizer" and kind != "mistral":
        if any(stage["type"] == "ByteLevel" for stage in stages):
            return  # transformers takes tokenizer.json as it is
        if _described(tokenizer)[:2] != ("BPE", [True, True, False]):
            raise ConfigError(
                f"{path}: tokenizer_class {name} uses BPE with fuse_unk and byte_fallback, but "
                f"tokenizer.json has {shown(_described(tokenizer)[:2])}; supported: such a BPE"
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
    changed = Tokenizer.from_str(json.dumps(state))
    changed.encode_special_tokens = tokenizer.encode_special_tokens
    return changed
