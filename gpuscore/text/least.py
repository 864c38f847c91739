"""A lower bound on the number of tokens of a text that costs next to nothing.

A text that is too long for any model must be refused before it is tokenised, and one that is not
must never be refused. Let w(c) be the length of the longest entry that holds the unit c, added
tokens included. A token that stands for the units c1 ... ck is an entry of k units or more, so
w(ci) >= k and the sum of 1/w(ci) over its units is at most 1. If no unit is lost between the text
and its tokens, the sum over the whole text is therefore at most the number of its tokens.

*Units* are the bytes of UTF-8 before a byte-level model, otherwise characters. They are those of
the normalized text; what that has to do with the text as it came:

- Prepend, Metaspace's prefix and ByteLevel's prefix space add units. Replace ' ' by META and
  Metaspace put one character in the place of one.
- *NFC* may take units away: at most `SHRINK` become one. Let b(d) be the longest character whose
  decomposition is the lone character d. No character is longer than the sum of b over its own full
  decomposition, a text and its NFC have the same decomposition, and the sum of b over that of one
  character in NFC is at most 3.5 times its length (U+0390); in characters the figure is 4
  (U+1F82). `tests/text/test_least.py` goes through all of Unicode. A character of ASCII stays
  itself, and combines with nothing before it, so that one behind which another one follows, or the
  text's end, is counted as it is. Everything else counts as a `SHRINK`th of a unit of the longest
  entry, which no unit of the normalized text can undercut.

Units are lost, and there is no bound, where a pre-tokenizer or a model drops text, where unknown
characters are fused into one token, where an added token swallows the white space beside it, and
behind any component that is not listed here.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from gpuscore.arrays import Float64Array
from gpuscore.text.boundaries import added_contents, flat
from gpuscore.text.pretokens import META
from gpuscore.text.turns import ALONE, COPIED, Turns

SHRINK = 4
WINDOW = 1 << 16  # characters looked at in one go
OTHERS = 0x10000  # the place of all characters beyond the first plane
ROUNDING = 1e-9  # of a sum of up to 2**30 numbers; far more than float64 loses
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# They keep all text; the others may drop some.
KEEP_TEXT = frozenset({"ByteLevel", "Metaspace", "Digits"})
KEEP_MATCHES = frozenset({"Isolated", "Contiguous", "MergedWithPrevious", "MergedWithNext"})


@dataclass(frozen=True, slots=True)
class LeastTokens:
    """The bound for one tokenizer.

    Args:
        weights: [256] of bytes, or [OTHERS + 1] of characters; at most 1.
        in_bytes: whether units are bytes.
        composes: whether the normalizer may make one character of several.
    """

    weights: Float64Array
    in_bytes: bool
    composes: bool

    def of(self, text: str, limit: int, turns: Turns = ALONE) -> int:
        """At most the number of the text's tokens; counted on until it is over the limit."""
        total = 0.0
        for start in range(0, len(text), WINDOW):
            turns.before(WINDOW // COPIED)
            total += self._window(text, start)
            if total > limit + 1:
                break
        return ceil(total * (1 - ROUNDING) - ROUNDING)

    def _window(self, text: str, start: int) -> float:
        units = self._units(text[start : start + WINDOW])
        weights = self.weights[np.minimum(units, len(self.weights) - 1)]
        if self.composes:
            behind = text[start + WINDOW : start + WINDOW + 1]
            stays = units < 128
            stays[:-1] &= stays[1:]
            stays[-1] &= behind.isascii()
            weights = np.where(stays, weights, self.weights.min() / SHRINK)
        return float(weights.sum())

    def _units(self, text: str) -> Any:
        # A half of a surrogate pair is refused later, by the tokenizer.
        if self.in_bytes:
            return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def find_least_tokens(tokenizer: Tokenizer) -> LeastTokens | None:
    """The bound for a tokenizer, or None if none can be proven."""
    normalizers = flat(tokenizer.normalizer, "normalizers")
    stages = flat(tokenizer.pre_tokenizer, "pretokenizers")
    added = tokenizer.get_added_tokens_decoder().values()
    if normalizers is None or stages is None or any(t.lstrip or t.rstrip for t in added):
        return None
    if not all(map(_keeps_units, normalizers)) or not all(map(_keeps_text, stages)):
        return None
    in_bytes = any(stage["type"] == "ByteLevel" for stage in stages)
    has_meta = any(part["type"] in ("Replace", "Metaspace") for part in (*normalizers, *stages))
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    if not _knows_all(tokenizer.model, vocab, in_bytes) or (in_bytes and has_meta):
        return None
    contents = list(added_contents(tokenizer))
    weights = (
        _byte_weights(vocab, contents) if in_bytes else _character_weights([*vocab, *contents])
    )
    return LeastTokens(weights, in_bytes, any(n["type"] == "NFC" for n in normalizers))


def _keeps_units(normalizer: Mapping[str, Any]) -> bool:
    match normalizer:
        case {"type": "NFC"} | {"type": "Prepend"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
            return True
    return False


def _keeps_text(stage: Mapping[str, Any]) -> bool:
    if stage["type"] in ("Split", "Punctuation"):
        return stage["behavior"] in KEEP_MATCHES
    return stage["type"] in KEEP_TEXT and stage.get("replacement", META) == META


def _knows_all(model: object, vocab: Mapping[str, int], in_bytes: bool) -> bool:
    """Whether every unit becomes a part of a token of its own or of others."""
    if not isinstance(model, models.BPE | models.Unigram):
        return False
    if in_bytes:
        return vocab.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    if isinstance(model, models.BPE):
        falls_back = model.byte_fallback
        alone = bool(model.unk_token) and not model.fuse_unk
    else:  # has no such attribute, and fuses unknown characters
        falls_back, alone = json.loads(model.__getstate__()).get("byte_fallback", False), False
    return alone or (falls_back and vocab.keys() >= set(BYTES))


def _longest(texts: Iterable[str]) -> dict[str, int]:
    """Of every character the length of the longest text that holds it."""
    longest: dict[str, int] = {}
    for text in sorted(texts, key=len):
        longest.update(dict.fromkeys(text, len(text)))
    return longest


def _byte_weights(vocab: Iterable[str], added: Iterable[str]) -> Float64Array:
    lengths = np.ones(256)
    byte_of = dict(_byte_alphabet())
    for character, length in _longest(vocab).items():
        if character in byte_of:
            lengths[byte_of[character]] = length
    for content in added:
        raw = np.frombuffer(content.encode(), np.uint8)
        lengths[raw] = np.maximum(lengths[raw], len(raw))
    return 1 / lengths


def _byte_alphabet() -> Iterator[tuple[str, int]]:
    """The character by which byte-level vocabularies write each byte: GPT-2's
    `bytes_to_unicode`, where bytes that cannot be printed go behind the first 256 characters."""
    shifted = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield chr(byte), byte
        else:
            yield chr(shifted), byte
            shifted += 1


def _character_weights(texts: Iterable[str]) -> Float64Array:
    """An unknown character is a token of its own, or several."""
    lengths = np.ones(OTHERS + 1)
    for character, length in _longest(texts).items():
        place = min(ord(character), OTHERS)
        lengths[place] = max(lengths[place], length)
    lengths[ord(" ")] = max(lengths[ord(" ")], lengths[ord(META)])
    return 1 / lengths
