"""A cheap lower bound on the number of tokens of a text.

A text that is too long for any model must be refused before it is tokenised, and a shorter one must
never be refused. Let w(c) be the length of the longest entry that contains the unit c, among the
vocabulary and the added tokens. A token that stands for the units c1 ... ck is an entry of k units
or more, so w(ci) >= k, and the sum of 1/w(ci) over its units is at most 1. If no unit is lost
between the text and its tokens, the sum over the whole text is at most the number of its tokens.

*Units* are UTF-8 bytes for a byte-level model, otherwise characters. They are the units of the
normalized text, which the tokenizer makes from the given text:

- Prepend, Metaspace's prefix and ByteLevel's prefix space add units. Replace ' ' by META and
  Metaspace replace one character by one.
- *NFC* may remove units: at most `SHRINK` become one. Let b(d) be the length of the longest
  character whose decomposition is the single character d. No character is longer than the sum of b
  over its own full decomposition. A text and its NFC have the same decomposition. The sum of b over
  the decomposition of one character in NFC is at most 3.5 times its length in bytes (U+0390), or 4
  times its length in characters (U+1F82). `tests/text/test_least.py` checks all of Unicode. An
  ASCII character is its own NFC and combines with nothing before it. So an ASCII character that is
  followed by another one, or by the end of the text, counts with its own weight. Any other unit
  counts as 1/`SHRINK` of the smallest weight, which no unit of the normalized text can undercut.

Units are lost, and there is no bound, if a pre-tokenizer or a model drops text, if unknown
characters are fused into one token, if an added token swallows the white space beside it, or if the
tokenizer has any component that is not listed here.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from gpuscore.text.boundaries import ALONE, COPIED, Turns, added_contents, flat, image_of_space
from gpuscore.text.pretokens import META
from gpuscore.types.batch import Float64Array

SHRINK = 4
WINDOW = 1 << 16  # characters that are counted at a time
OTHERS = 0x10000  # index of the weight of all characters beyond the first plane
ROUNDING = 1e-9  # relative error of a sum of up to 2**30 numbers; float64 loses far less
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Pre-tokenizers and split behaviours that keep all text.
KEEP_TEXT = frozenset({"ByteLevel", "Metaspace", "Digits"})
KEEP_MATCHES = frozenset({"Isolated", "Contiguous", "MergedWithPrevious", "MergedWithNext"})


@dataclass(frozen=True, slots=True)
class LeastTokens:
    """The bound for one tokenizer.

    Args:
        weights: 1/w, as [256] for bytes or [OTHERS + 1] for characters; at most 1.
        in_bytes: units are bytes.
        composes: the normalizer may turn several characters into one.
    """

    weights: Float64Array
    in_bytes: bool
    composes: bool

    def of(self, text: str, limit: int, turns: Turns = ALONE) -> int:
        """Return a lower bound on the text's tokens; stop counting once it is over `limit`."""
        total, _ = self._count(text, limit, turns)
        return ceil(total * (1 - ROUNDING) - ROUNDING)

    def reach(self, text: str, count: int, turns: Turns = ALONE) -> int:
        """Return a length such that this much of the text has more than `count` tokens.

        It is the whole text's length if the bound of the whole text is not over `count`.
        """
        return self._count(text, count, turns)[1]

    def _count(self, text: str, limit: int, turns: Turns) -> tuple[float, int]:
        """Return the bound of the text's first windows, those up to `limit`, and their length."""
        total = 0.0
        for start in range(0, len(text), WINDOW):
            turns.before(WINDOW // COPIED)
            total += self._window(text, start)
            if total > limit + 1:
                return total, min(start + WINDOW, len(text))
        return total, len(text)

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
        # The tokenizer refuses lone surrogates later.
        if self.in_bytes:
            return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def find_least_tokens(tokenizer: Tokenizer) -> LeastTokens | None:
    """Return the bound for a tokenizer, or None if none can be proven."""
    normalizers = flat(tokenizer.normalizer, "normalizers")
    stages = flat(tokenizer.pre_tokenizer, "pretokenizers")
    added = tokenizer.get_added_tokens_decoder().values()
    if normalizers is None or stages is None or any(t.lstrip or t.rstrip for t in added):
        return None
    if image_of_space(normalizers) is None or not all(map(_keeps_text, stages)):
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


def _keeps_text(stage: Mapping[str, Any]) -> bool:
    if stage["type"] in ("Split", "Punctuation"):
        return stage["behavior"] in KEEP_MATCHES
    return stage["type"] in KEEP_TEXT and stage.get("replacement", META) == META


def _knows_all(model: object, vocab: Mapping[str, int], in_bytes: bool) -> bool:
    """Return True if the model turns every unit into a token or a part of one."""
    if not isinstance(model, models.BPE | models.Unigram):
        return False
    if in_bytes:
        return vocab.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    if isinstance(model, models.BPE):
        falls_back = model.byte_fallback
        alone = bool(model.unk_token) and not model.fuse_unk
    else:  # Unigram has no such attribute, and fuses unknown characters
        falls_back, alone = json.loads(model.__getstate__()).get("byte_fallback", False), False
    return alone or (falls_back and vocab.keys() >= set(BYTES))


def _longest(texts: Iterable[str]) -> dict[str, int]:
    """Return for every character the length of the longest text that contains it."""
    longest: dict[str, int] = {}
    for text in sorted(texts, key=len):
        longest.update(dict.fromkeys(text, len(text)))
    return longest


def _byte_weights(vocab: Iterable[str], added: Iterable[str]) -> Float64Array:
    lengths = np.ones(256)
    byte_of = dict(byte_alphabet())
    for character, length in _longest(vocab).items():
        if character in byte_of:
            lengths[byte_of[character]] = length
    for content in added:
        raw = np.frombuffer(content.encode(), np.uint8)
        lengths[raw] = np.maximum(lengths[raw], len(raw))
    return 1 / lengths


def byte_alphabet() -> Iterator[tuple[str, int]]:
    """Yield the character that stands for each byte in byte-level vocabularies, with the byte.

    The mapping is GPT-2's `bytes_to_unicode`: printable bytes stand for themselves, the others are
    mapped to characters after the first 256.
    """
    shifted = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield chr(byte), byte
        else:
            yield chr(shifted), byte
            shifted += 1


def _character_weights(texts: Iterable[str]) -> Float64Array:
    """Return the weights of characters; 1 for an unknown one, which is at least one token."""
    lengths = np.ones(OTHERS + 1)
    for character, length in _longest(texts).items():
        place = min(ord(character), OTHERS)
        lengths[place] = max(lengths[place], length)
    lengths[ord(" ")] = max(lengths[ord(" ")], lengths[ord(META)])
    return 1 / lengths
