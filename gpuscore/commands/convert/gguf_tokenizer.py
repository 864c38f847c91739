"""The tokenizer of a GGUF file: transformers' conversion of it, completed and checked.

A file names how text is split before the merges (`tokenizer.ggml.pre`). With a name that
transformers does not know, it splits as GPT-2 does, in silence; here such a name is refused.
"""

from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gpuscore.commands.convert.gguf_file import GgufFile
from gpuscore.errors import UsageError

_PRE, _MODEL, _TOKENS = "tokenizer.ggml.pre", "tokenizer.ggml.model", "tokenizer.ggml.tokens"
_TEMPLATE = "tokenizer.chat_template"
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe")
_SPLITS = ("gpt-2", "qwen2", "smollm", *_LLAMA3)


def check_tokenizer(file: GgufFile) -> None:
    """Refuse a file without a tokenizer, or with an unknown tokenizer.

    Raises:
        UsageError: the message names the tokenizer found and the supported ones.
    """
    if _MODEL not in file.metadata or _TOKENS not in file.metadata:
        raise UsageError(f"{file.path} has no tokenizer ({_MODEL}, {_TOKENS})")
    model, pre = file.of_type(_MODEL, str), file.metadata.get(_PRE)
    if not all(isinstance(token, str) for token in file.of_type(_TOKENS, list)):
        raise UsageError(f"{file.path}: {_TOKENS} must be a list of texts")
    template(file)
    if model == "gpt2" and pre not in _SPLITS:
        raise UsageError(
            f"{file.path} splits text by {pre!r:.60} ({_PRE}); supported: {', '.join(_SPLITS)}"
        )
    if model not in ("gpt2", "llama"):
        raise UsageError(
            f"{file.path} has a tokenizer of kind {model!r:.60} ({_MODEL}); supported: gpt2, llama"
        )
    gemma = file.architecture.startswith("gemma")
    space = file.metadata.get("tokenizer.ggml.add_space_prefix", not gemma)
    if model == "llama" and space is gemma:
        raise UsageError(
            f"{file.path}: tokenizer.ggml.add_space_prefix is {space}; supported for "
            f"{file.architecture}: {not gemma}"
        )


def complete(tokenizer: Any, file: GgufFile) -> None:
    """Make transformers' tokenizer give the ids that the authors' and llama.cpp's give."""
    backend, pre = tokenizer.backend_tokenizer, file.metadata.get(_PRE)
    if file.metadata[_MODEL] == "llama" and not file.architecture.startswith("gemma"):
        # As llama.cpp and the tokenizer.json of Llama 2: a space before the text after every
        # special token, not at the beginning only.
        prefix, spaces = normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")
        backend.normalizer = normalizers.Sequence([prefix, spaces])
        backend.pre_tokenizer = None
    elif file.metadata[_MODEL] == "llama":
        return
    elif pre == "smollm":  # as its tokenizer.json
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    elif pre in _LLAMA3:  # as its tokenizer.json: a word of the vocabulary needs no merges
        backend.model.ignore_merges = True
        if "tokenizer.ggml.add_bos_token" not in file.metadata:
            tokenizer.add_bos_token = True
    elif pre == "qwen2":  # as transformers' Qwen2Tokenizer
        backend.normalizer = normalizers.NFC()


def check_written(written: Tokenizer, made: Tokenizer, file: GgufFile) -> None:
    """Check that the written tokenizer is the one made from the file, with the ids of its list.

    Raises:
        UsageError: a token has another id, or anything else of the tokenizer differs.
    """
    unlike = [
        number
        for number, token in enumerate(file.metadata[_TOKENS])
        if not _is_token(written.id_to_token(number), token)
    ]
    if unlike:
        raise UsageError(
            f"{file.path}: the tokenizer made from it has other tokens at {len(unlike)} ids, such "
            f"as {unlike[0]}"
        )
    if written.to_str() != made.to_str():
        raise UsageError(f"{file.path}: its tokenizer was not written as it was made")


def _is_token(written: str | None, token: str) -> bool:
    """Compare a token with the file's token, which transformers may spell as the authors do."""
    if written in (token, token.replace(" ", "\u2581")):
        return True
    spelling: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    return written == "".join(spelling[byte] for byte in token.encode())


def template(file: GgufFile) -> str | None:
    """Return the chat template of the file; None if it has none."""
    return file.of_type(_TEMPLATE, str) if _TEMPLATE in file.metadata else None
