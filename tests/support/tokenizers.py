"""Tiny tokenizers in the layouts of well-known models, trained so that separate tokenising goes
wrong.

Their merges cross white space, line ends and punctuation wherever the layout allows it.
"""

import functools
import json
import random
import re

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"^\s\p{L}", r"^\s\p{L}\p{M}")
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = f"{_WORD}[{_UPPER}]*[{_LOWER}]+{_SHORT}|{_WORD}[{_UPPER}]+[{_LOWER}]*{_SHORT}|{_REST}"
_HAN = r"&&[^\p{Han}]"
KIMI = (
    rf"[\p{{Han}}]+|{_WORD}[{_UPPER}{_HAN}]*[{_LOWER}{_HAN}]+{_SHORT}"
    rf"|{_WORD}[{_UPPER}{_HAN}]+[{_LOWER}{_HAN}]*{_SHORT}|{_REST.replace('/', '')}"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"""
    "\r\n"  # raw, as in the original
    r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["
    "\r\n"
    r"]*|\s*["
    "\r\n"
    r"]+|\s+(?!\S)|\s+",
)

WORDS = (
    *("the", "quick", "brown", "fox", "dogs", "lazy", "of", "it", "line", "end", "k", "q", "e"),
    *("caf\u00e9", "na\u00efve", "cafe\u0301", "\u4f60\u597d", "\u4e16\u754c", "\u304b\u304c"),
    *("\ud55c\uad6d\uc5b4", "\u0440\u0443\u0441", "1", "12", "123", "1234"),
)
BETWEEN = (
    *(" ", " ", " ", "  ", "\n", "\n\n", "\r\n", "\t", ". ", ".", ", ", ",\n", "! ", "(", ") "),
    *("'s ", "'t", "'", "-", ":\n", "/", "\uff0c", "\u3002", "\u0301", "\u0338", "\u3099", "?"),
)


def lines():
    """Yield lines with all kinds of neighbouring words, often enough for merges."""
    rng = random.Random(0)
    for _ in range(800):
        parts = [(rng.choice(WORDS), rng.choice(BETWEEN)) for _ in range(rng.randrange(1, 6))]
        yield "".join(word + between for word, between in parts)


LINES = tuple(lines())
# Broken before most spaces, so that only some characters merge with a space after them.
BROKEN = tuple(piece for line in LINES for piece in re.split(r"(?<=[^e\n.\u3002])(?= )", line))
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHAT = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
# Added tokens with every option; some look like ordinary text.
NASTY = (
    AddedToken("<|im_end|>", lstrip=True, rstrip=True, special=True, normalized=False),
    AddedToken("fox.", normalized=False),
    AddedToken("dogs", single_word=True, normalized=True),
    AddedToken("e q", normalized=False),
    AddedToken(" th", lstrip=True, normalized=True),
    AddedToken("\n\n", rstrip=True, normalized=False),
    AddedToken("\u00e9", normalized=True),
    AddedToken("y.", single_word=True, rstrip=True, normalized=True),
    AddedToken("k", lstrip=True, single_word=True, normalized=False),
    AddedToken("caf\u0065\u0301 ", normalized=True),
)


def splits(*patterns, **options):
    how = {"behavior": "isolated"} | options
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    parts = [pre_tokenizers.Split(Regex(pattern), **how) for pattern in patterns]
    return pre_tokenizers.Sequence([*parts, byte_level])


def byte_level(pre_tokenizer, normalizer=None, added=CHAT, bos=False, **model):
    """Return a tokenizer trained without any split, so that merges cross every border of
    pre-tokens."""
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_tokens(list(added))
    if bos:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
            ]
        )
    return tokenizer


def sentencepiece(normalizer, pre_tokenizer=None, *, added=(), **model):
    """Return BPE over META with bytes as fallback and <s> in front; some merges cross META."""
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True} | model
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<unk>", "<s>", "</s>", *BYTES],
        show_progress=False,
    )
    tokenizer.train_from_iterator(BROKEN, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are entries only
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_tokens(list(added))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def unigram(pre_tokenizer, normalizer=None, added=()):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(added))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def replace_spaces():
    return normalizers.Replace(" ", "\u2581")


def prepended():
    return normalizers.Sequence([normalizers.Prepend("\u2581"), replace_spaces()])


META_FIRST = {"prepend_scheme": "first", "split": False}

LAYOUTS = {
    "gpt2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2, prefix space": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "qwen2": lambda: byte_level(splits(QWEN2), normalizers.NFC()),
    "qwen2, nasty tokens": lambda: byte_level(splits(QWEN2), normalizers.NFC(), NASTY),
    "qwen3.5": lambda: byte_level(splits(QWEN35), normalizers.NFC()),
    "llama3": lambda: byte_level(splits(LLAMA3), bos=True, ignore_merges=True),
    "granite": lambda: byte_level(splits(LLAMA3, behavior="removed", invert=True)),
    "o200k": lambda: byte_level(splits(O200K)),
    "kimi": lambda: byte_level(splits(KIMI)),
    "deepseek": lambda: byte_level(splits(*DEEPSEEK), bos=True),
    "smollm": lambda: byte_level(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    ),
    "falcon": lambda: byte_level(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation("contiguous"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
                pre_tokenizers.Digits(individual_digits=False),
                pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
            ]
        )
    ),
    "llama2": lambda: sentencepiece(prepended()),
    "llama2, nasty tokens": lambda: sentencepiece(prepended(), added=NASTY),
    "mistral": lambda: sentencepiece(None, pre_tokenizers.Metaspace(**META_FIRST), added=CHAT),
    "gemma": lambda: sentencepiece(
        replace_spaces(),
        pre_tokenizers.Split(" ", "merged_with_previous"),
        added=[AddedToken(t, normalized=False) for t in ("\u2581\u2581", "\n\n", "</i>")],
    ),
    "no unknown token": lambda: sentencepiece(
        replace_spaces(), unk_token=None, byte_fallback=False
    ),
    "unknown fused": lambda: sentencepiece(replace_spaces(), byte_fallback=False),
    "unknown not fused": lambda: sentencepiece(
        replace_spaces(), fuse_unk=False, byte_fallback=False
    ),
    "BPE, Metaspace": lambda: sentencepiece(None, pre_tokenizers.Metaspace()),
    "unigram": lambda: unigram(pre_tokenizers.Metaspace(), added=CHAT),
    "unigram, nasty tokens": lambda: unigram(
        pre_tokenizers.Metaspace(prepend_scheme="first"), normalizers.NFC(), NASTY
    ),
}

# make test searches with these; make test-all with the others too.
SOME = (
    *("gpt2", "qwen2", "qwen2, nasty tokens", "llama3", "llama2", "gemma"),
    *("BPE, Metaspace", "unigram"),
)
OTHERS = tuple(name for name in LAYOUTS if name not in SOME)


@functools.cache
def trained(name):
    """Return a tokenizer of LAYOUTS as JSON."""
    return LAYOUTS[name]().to_str()
