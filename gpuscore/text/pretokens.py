r"""Pairs of characters between which a pre-token is certain to start, in any text.

A *pair* is a character l and the character r after it; the split lies between them. Two kinds of
pairs are considered, because one argument then fits the patterns of all common tokenizers:

    space:  l is a visible character (`VISIBLE`), r is ' '
    stop:   l is a letter or a digit (`LETTERS`), r is one of `STOPS`, newline included

**Lemma.** Assume that no match of a pattern can contain l followed by r, and that every lookahead
reads at most one character after white space. Then a search finds the same matches left of the
split whether the text ends there or goes on: a branch that would read r fails, as it fails at the
end of a text, and no lookahead is evaluated at the split, because l is no white space. The search
continues at the split or before it. Without lookbehind, the matches from r on depend only on r and
the text after it. If, in addition, some alternative matches at r, a pre-token starts there.

The lemma applies to each of `ALTERNATIVES`, and so to every pattern made of them, because a match
of A|B is a match of A or of B:

- *space*: after a visible character they match letters, marks, digits, punctuation, '/' or line
  ends, never ' '. A leading ` ?` or `[^...]?` comes before the first of these, never after one.
- *stop*: after a letter or a digit they match letters, marks, digits or the apostrophe of a
  contraction. `STOPS` has no such character. Punctuation never follows a letter in a match; line
  ends follow only punctuation or white space.
- At r = ' ' or newline `\s+` matches; at another stop one of `PUNCTUATION` does. Unmatched text is
  a pre-token of its own (or dropped), so it does not matter if l is matched.

Digits in groups of three are counted from the left, so the split does not change the groups.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

# All have been letters, digits or punctuation since early versions of Unicode, so regex engines
# agree on them. Each is its own NFC, after any other character (tests/text/test_boundaries.py).
LETTERS = (
    "A-Za-z0-9\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u0236\u0400-\u0481\u048a-\u04ce"
    "\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
VISIBLE = LETTERS + "!-/:-@\\[-`{-~\u3001\u3002\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
STOPS = ",.;:!?\n\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
RIGHTS = frozenset(" " + STOPS)
PAIR = re.compile(f"[{VISIBLE}] |[{LETTERS}][{STOPS}]")

WHITE = frozenset(" \n")  # the part of RIGHTS that \s+ matches
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
# Runs of one class of characters: l alone decides if a run ends at the split.
CLASSES = frozenset(
    {
        *(r"\p{N}", r"\p{N}+", r"\p{N}{1,3}"),
        *(r"[\p{Han}]+", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    }
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = {  # o200k; Mistral has no contractions; Kimi treats Han separately
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
# Matches the first alternative of a pattern; no alternative has a "|" outside brackets.
_FIRST = re.compile(
    f"({'|'.join(re.escape(a) for a in sorted(ALTERNATIVES, key=len, reverse=True))})(?:\\||\\Z)"
)
META = "\u2581"


def pretoken_starts(
    stages: Iterable[Mapping[str, Any]], space: str
) -> tuple[frozenset[str], frozenset[str]]:
    """Return every r at which a pre-token is certain to start, and every r that stays open.

    At an open r, a pre-token may start or go on; everything else is split as if each side of the
    split were a text of its own.

    Each stage splits the pre-tokens of the stage before one by one, so separate pre-tokens stay
    separate, and by induction an open r stays open. Two stages depend on more than the pre-token:
    Metaspace's `first` on its being the start of the text, which the right side of a split never
    is; ByteLevel's prefix space on the pre-token's beginning only.

    Args:
        stages: pre-tokenizers as in tokenizer.json, with sequences flattened.
        space: the character into which the normalizers turn ' '.
    """
    certain = NONE
    still_open = RIGHTS
    for stage in stages:
        effect = _effect(stage, space)
        if effect is None:
            return NONE, NONE
        splits, keeps = effect
        certain |= still_open & splits
        still_open = (still_open & keeps) - splits
        if stage["type"] == "Metaspace":
            space = META
    return certain, still_open


def _effect(stage: Mapping[str, Any], space: str) -> tuple[frozenset[str], frozenset[str]] | None:
    """Return every r at which a stage splits, and every r that it keeps open; None if unknown."""
    match stage:
        case {"type": "ByteLevel", "use_regex": True}:  # has the regex of GPT-2 built in
            return (RIGHTS, RIGHTS) if space == " " else (NONE, NONE)
        case {"type": "ByteLevel"}:  # changes the alphabet, so no r can stay open
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
    # Removed + invert also keeps the matches as pre-tokens (and drops unmatched text).
    mode = stage["behavior"], stage["invert"]
    if space != " " or not known or mode not in {("Isolated", False), ("Removed", True)}:
        return NONE, NONE
    splits = WHITE if r"\s+" in known else NONE
    if known & PUNCTUATION:
        splits |= RIGHTS - WHITE
    return splits, RIGHTS if known <= CLASSES else NONE


def _alternatives(pattern: str) -> frozenset[str]:
    """Return the alternatives of a pattern; none if one of them is not in `ALTERNATIVES`."""
    alternatives = set()
    pattern = pattern.replace("\r", r"\r").replace("\n", r"\n")  # DeepSeek writes them unescaped
    if pattern.endswith("|"):  # an empty alternative
        return NONE
    while pattern:
        match = _FIRST.match(pattern)
        if match is None:
            return NONE
        alternatives.add(match[1])
        pattern = pattern[match.end() :]
    return frozenset(alternatives)
