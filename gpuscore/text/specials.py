"""The special tokens that a tokenizer's post-processor adds before and after any text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from gpuscore.text.boundaries import flat
from gpuscore.types.arrays import Int32Array

PROBES = ("a b", "1, 2", "Z\n", "")


@dataclass(frozen=True, slots=True)
class Specials:
    """The special tokens before and after a text."""

    opening: Int32Array
    closing: Int32Array


def find_specials(tokenizer: Tokenizer) -> Specials | None:
    """Return the special tokens before and after a text, or None if they may depend on the text.

    A template adds the same tokens to every text. They are found by comparing encodings with and
    without special tokens: exactly one split must fit all `PROBES`.
    """
    parts = flat(tokenizer.post_processor, "processors")
    if parts is None or not all(map(_is_constant, parts)):
        return None
    try:
        fitting = set.intersection(*(_splits(tokenizer, probe) for probe in PROBES))
    except Exception:  # noqa: BLE001  (raised by the library for characters without a token)
        return None
    if len(fitting) != 1:
        return None
    opening, closing = (np.array(ids, dtype=np.int32) for ids in fitting.pop())
    return Specials(opening, closing)


def _is_constant(part: Mapping[str, Any]) -> bool:
    if part["type"] == "ByteLevel":  # changes offsets only
        return True
    if part["type"] != "TemplateProcessing":
        return False
    sequences = [piece["Sequence"]["id"] for piece in part["single"] if "Sequence" in piece]
    return sequences == ["A"]


def _splits(tokenizer: Tokenizer, text: str) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return all (opening, closing) that fit the encodings of this text."""
    own = tokenizer.encode(text, add_special_tokens=False).ids
    full = tokenizer.encode(text).ids
    return {
        (tuple(full[:k]), tuple(full[k + len(own) :]))
        for k in range(len(full) - len(own) + 1)
        if full[k : k + len(own)] == own
    }
