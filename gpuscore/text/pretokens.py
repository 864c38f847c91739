r"""Where a pre-token surely starts, whatever stands on the two sides of a pair of characters.

A *pair* is a character l and the character r behind it; the cut lies between. Two kinds are looked
at, chosen so that one argument fits the patterns of all common tokenizers:

    space:  l is a visible character (`VISIBLE`), r is ' '
    stop:   l is a letter or a digit (`LETTERS`), r is one of `STOPS`, newline included

**Lemma.** If no match of a pattern can hold l and r side by side, and every lookahead is at most
one character behind white space, then a search finds the same matches left of the cut whether the
text ends there or goes on: a branch that would read r fails, just as it fails at the end, and no
lookahead is asked for at the cut, because l is no white space. The search goes on at the cut or
before, and without lookbehind what it finds from r on depends on r and what follows only. If, in
addition, some alternative matches at r, a pre-token starts there.

Why that holds for each of `ALTERNATIVES` (a match of A|B is a match of A or of B, so that a pattern
made of them needs no further argument):

- *space*: after a visible character they take letters, marks, digits, punctuation, '/' or line
  ends, never ' '. A leading ` ?` or `[^...]?` is before the first of these, never behind one.
- *stop*: a letter or a digit is followed by letters, marks, digits or the apostrophe of a
  contraction. `STOPS` has none of these. Punctuation never follows a letter in one match, and line
  ends follow only punctuation or white space.
- at r = ' ' or newline `\s+` matches, at another stop one of `PUNCTUATION` does. Unmatched text is
  a pre-token of its own (or dropped), so that it does not matter whether l is matched.

Digits in groups of three count from the left, and all that is left of the cut stays together.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Each a letter, a digit or punctuation since the first versions of Unicode, so that regex engines
# agree; each its own NFC, also behind any other character (tests/text/test_boundaries.py).
LETTERS = (
    "A-Za-z0-9\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u0236\u0400-\u0481\u048a-\u04ce"
    "\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
VISIBLE = LETTERS + "!-/:-@\\[-`{-~\u3001\u3002\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
STOPS = ",.;:!?\n\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
RIGHTS = frozenset(" " + STOPS)
PAIR = re.compile(f"[{VISIBLE}] |[{LETTERS}][{STOPS}]")

WHITE = frozenset(" \n")  # what \s+ matches of RIGHTS
NONE: frozenset[str] = frozenset()

PUNCTUATION = frozenset(
    {
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r" ?[\p{P}\p{S}]+[\r\n]*",
    }
)
# Runs of one class: whether one ends at a cut is decided by l alone.
CLASSES = frozenset(
    {
        *(r"\p{N}", r"\p{N}+", r"\p{N}{1,3}"),
        *(r"[\p{Han}]+", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    }
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = {  # o200k; Mistral has no contractions; Kimi sets Han apart
    rf"[^\r\n\p{{L}}\p{{N}}]?{upper}{lower}{short}"
    for han in ("", r"&&[^\p{Han}]")
    for upper, lower in (
        (f"[{_UPPER}{han}]*", f"[{_LOWER}{han}]+"),
        (f"[{_UPPER}{han}]+", f"[{_LOWER}{han}]*"),
    )
    for short in ("", f"{_SHORT}?")
}
ALTERNATIVES = (
    PUNCTUATION
    | CLASSES
    | _CASED
    | {
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        _SHORT,
        r"'(?:[sdmt]|ll|ve|re)",
        r"'(?i:[sdmt]|ll|ve|re)",
        r" ?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?+\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        *(r" ?\p{N}", r" ?\p{N}+"),
        *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
    }
)
# The alternative that a pattern begins with; no alternative has a "|" outside brackets.
_FIRST = re.compile(
    f"({'|'.join(re.escape(a) for a in sorted(ALTERNATIVES, key=len, reverse=True))})(?:\\||\\Z)"
)
META = "\u2581"


def pretoken_starts(
    stages: Iterable[Mapping[str, Any]], space: str
) -> tuple[frozenset[str], frozenset[str]]:
    """Before which r a pre-token surely starts, and which r stay open.

    An open r is treated alike on both sides in every text: either a pre-token starts there or the
    pre-token goes on, and all else is split as if each side stood alone.

    Every stage listed here splits each pre-token of the stage before by itself, so what was
    separate stays so, and by induction the sides of an open r stay alike. Two look further than
    their pre-token: Metaspace's `first` asks whether the pre-token starts the text, which what is
    right of a cut never does; ByteLevel's prefix space looks at the pre-token's beginning only.

    Args:
        stages: pre-tokenizers as in tokenizer.json, sequences flattened.
        space: what the normalizer makes of ' '.
    """
    certain, still_open = NONE, RIGHTS
    for stage in stages:
        effect = _effect(stage, space)
        if effect is None:
            return NONE, NONE
        cuts, keeps = effect
        certain |= still_open & cuts
        still_open = (still_open & keeps) - cuts
        if stage["type"] == "Metaspace":
            space = META
    return certain, still_open


def _effect(stage: Mapping[str, Any], space: str) -> tuple[frozenset[str], frozenset[str]] | None:
    """Before which r one stage splits, and which it keeps open; None for an unknown stage."""
    match stage:
        case {"type": "ByteLevel", "use_regex": True}:  # has the regex of GPT-2 built in
            return (RIGHTS, RIGHTS) if space == " " else (NONE, NONE)
        case {"type": "ByteLevel"}:  # another alphabet: nothing is known of what is still open
            return NONE, NONE
        case {"type": "Metaspace", "replacement": "\u2581"}:
            # every META starts a pre-token
            return (frozenset(" ") if stage.get("split", True) else NONE), RIGHTS
        case {"type": "Digits"}:  # splits by classes of single characters
            return NONE, RIGHTS
        case {"type": "Punctuation", "behavior": "Isolated" | "Contiguous"}:
            return NONE, RIGHTS
        case {"type": "Split"}:
            return _split_effect(stage, space)
    return None


def _split_effect(stage: Mapping[str, Any], space: str) -> tuple[frozenset[str], frozenset[str]]:
    pattern = stage["pattern"]
    if pattern in ({"String": " "}, {"Regex": " "}) and space != " ":
        return NONE, RIGHTS  # Gemma: no ' ' is left to split at
    known = _alternatives(pattern.get("Regex", ""))
    # Removed + invert, too, keeps the matches as pre-tokens (and drops what matches nothing).
    how = stage["behavior"], stage["invert"]
    if space != " " or not known or how not in {("Isolated", False), ("Removed", True)}:
        return NONE, NONE
    cuts = WHITE if r"\s+" in known else NONE
    if known & PUNCTUATION:
        cuts |= RIGHTS - WHITE
    return cuts, RIGHTS if known <= CLASSES else NONE


def _alternatives(pattern: str) -> frozenset[str]:
    """The alternatives of a pattern; none if one of them is not in `ALTERNATIVES`."""
    found = set()
    pattern = pattern.replace("\r", r"\r").replace("\n", r"\n")  # DeepSeek has them raw
    if pattern.endswith("|"):  # an empty alternative
        return NONE
    while pattern:
        match = _FIRST.match(pattern)
        if match is None:
            return NONE
        found.add(match[1])
        pattern = pattern[match.end() :]
    return frozenset(found)
