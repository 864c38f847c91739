"""Safe splits: places in a text whose two sides can be tokenised separately.

A split between the characters l and r of a text is *safe* if for all texts X that end with l and
all texts Y that begin with r (ids are those without special tokens of the post-processor)

    ids(XY) = ids(X) + t(Y)    with    t(Y) = ids(lY) without its first len(ids(l))

so that t(Y) depends on Y and l only. l stays in front of Y as a guard, so that Y never stands at
the beginning of a text, where normalizers and pre-tokenizers may add a prefix.

The proof follows the order in which a tokenizer works. Each step shows that the tokenizer treats
the left side of the split in XY as it treats X alone, and the right side as in lY.

1. *Added tokens* are searched first in the text; those with `normalized` are then searched in the
   normalized pieces between. Matches are leftmost, longest and never overlap. No added token has l
   followed by r, so no match crosses the split, and the search never jumps over it. No added token
   ends with l, so the piece that ends X also begins Y: l and r are in one piece, which does not
   begin at the split. l is no white space, so `lstrip` of a token in Y and `rstrip` of a token in X
   stop before the split. `single_word` checks one character on either side of a token: after a
   token in X, that is l at the latest; before a token in Y, it is l at the earliest. X and lY both
   contain l. All these conditions are checked for the raw and the normalized contents of tokens.
2. *Normalizers* work on each piece. NFC: r is a starter that composes with nothing before it, so
   NFC treats the two sides separately and leaves l and r as they are (`pretokens.LETTERS`). Replace
   ' ' by META: one character at a time. Prepend: at the beginning of a piece, which is not the
   split.
3. *Pre-tokenizers*: `pretokens.pretoken_starts`. If a pre-token is certain to start at r, every
   model treats the sides separately, because it gets one pre-token at a time.
4. *BPE inside a pre-token* (SentencePiece style). If l and r are entries of the vocabulary, their
   symbols are never dropped, never bytes, and never fused with an unknown neighbour: l ends a run
   of unknown characters (`fuse_unk`), and no such run reaches r. A symbol's text is the text of
   the symbols merged into it, so the last symbol left of the split ends with l and the first one
   right of it begins with r. Their merge would be an entry that has l followed by r. There is no
   such entry, so no merge crosses the split, and the merges of one side do not depend on the other.
   Their order (rank, then position) is the same in both texts. This needs a vocabulary with one
   text per id, no affixes of words, and no `ignore_merges`, which checks if X alone is an entry.
   *Unigram* inside a pre-token has no safe split. Without an entry across the split, its best path
   does separate into two. But it adds up scores from the beginning of the text, and rounding may
   decide near-ties in Y differently after another X.

Tokenizers with anything else (dropout, a Precompiled normalizer, an unknown regex, ...) have no
safe splits.

Work on long texts is done in pieces of bounded size: between two pieces a scheduler may pause it or
stop it (`announce`), and limits on tokens are checked.
"""

import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models

from gpuscore.text.pretokens import META, PAIR, RIGHTS, pretoken_starts

_listener: ContextVar[Callable[[int], None] | None] = ContextVar("listener", default=None)


def announce(characters: int) -> None:
    """Announce a piece of work that takes as long as tokenising `characters` characters.

    Within `announced_to` the call may block while other requests' text work runs.

    Raises:
        DeadlineExceeded: the request was given up; its work must stop.
    """
    if (listener := _listener.get()) is not None:
        listener(characters)


@contextmanager
def announced_to(listener: Callable[[int], None]) -> Iterator[None]:
    """Call `listener` with each piece of work that this thread announces in the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


# Copying or searching this many tokens or characters takes as long as tokenising one.
COPIES_PER_TOKEN = 16
# Characters that the tokenizer gets at a time. A piece takes about 20 ms, without interruption.
PIECE_CHARS = 1 << 16
# Making the objects of a text takes as long as tokenising this many characters.
TEXT_OVERHEAD = 100

# Characters to search for a piece's end; if none is found, the rest of the text is one piece.
SEARCH_CHARS = 16 * PIECE_CHARS

FindSplit = Callable[[str, int, int], int | None]


class OverLimit(Exception):
    """A text has more tokens than its limit: at least `least`."""

    def __init__(self, least: int) -> None:
        super().__init__(f"{least} tokens or more")
        self.least = least


def is_long(text: str) -> bool:
    """Return True if the text is encoded alone, in pieces if it has safe splits."""
    return len(text) > PIECE_CHARS


def pieces(text: str, find_split: FindSplit | None) -> Iterator[tuple[int, str]]:
    """Split a text into pieces of about PIECE_CHARS whose ids, concatenated, are the text's ids.

    Without a safe split nearby a piece is longer. Every piece after the first begins with the
    character before the split, its guard, whose ids must be dropped. This is correct: let XYZ have
    safe splits after X and after Y. Then ids(XYZ) = ids(X) + t(YZ). t(YZ) is ids(lYZ) without the
    guard's ids, and this is t(Y) + t(Z), because lYZ has a safe split after lY.

    Args:
        find_split: returns the first safe split between two places (`Boundaries.first`).

    Yields:
        The position of a piece in the text, and the piece.
    """
    start = 0
    while True:
        end = None
        if find_split is not None and len(text) - start > PIECE_CHARS:
            end = find_split(text, start + PIECE_CHARS, start + SEARCH_CHARS)
        begin = max(0, start - 1)
        end = end or len(text)
        yield begin, text[begin:end]
        if end == len(text):
            return
        start = end


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group texts into batches that cost up to PIECE_CHARS; a text that is longer is alone."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) + TEXT_OVERHEAD > PIECE_CHARS:
            yield batch
            batch = []
            size = 0
        batch.append(text)
        size += len(text) + TEXT_OVERHEAD
        if is_long(text):  # yielded before the next text is read: this one may be refused
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def cost(batch: Iterable[str]) -> int:
    """Return the characters of a single text that takes as long to tokenise as the batch."""
    return sum(len(text) + TEXT_OVERHEAD for text in batch)


@contextmanager
def limit_without(added: int, limit: int | None) -> Iterator[int | None]:
    """Yield the limit less `added` tokens; an OverLimit raised in the block counts them, too."""
    try:
        yield None if limit is None else limit - added
    except OverLimit as over:
        raise OverLimit(over.least + added) from None


def check_limit(least: int, limit: int | None) -> None:
    if limit is not None and least > limit:
        raise OverLimit(least)


# Characters per search for a split: at first, and at most.
FIRST_SEARCH = 64
LONGEST_SEARCH = 1 << 16


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The safe splits of one tokenizer, defined by the two characters around a split.

    Args:
        rights: every r that may follow a split.
        starts: the part of `rights` at which a pre-token certainly starts; others need `singles`.
        space: the character into which the normalizers turn ' '.
        endings: last characters of added tokens.
        pairs: two neighbours in an added token, the second one in `rights` (or `space`).
        singles: one-character entries of the vocabulary.
        merged: two neighbours in an entry, the second one in `rights` (or `space`).
    """

    rights: frozenset[str]
    starts: frozenset[str]
    space: str
    endings: frozenset[str]
    pairs: frozenset[str]
    singles: frozenset[str]
    merged: frozenset[str]

    def first(self, text: str, start: int = 1, end: int = sys.maxsize) -> int | None:
        """Return the first p with a safe split between text[:p] and text[p:], start <= p < end."""
        width = FIRST_SEARCH
        end = min(end, len(text))
        while start < end:
            announce(width // COPIES_PER_TOKEN)
            stop = min(start + width, end)
            split = next(self._splits(text, start, stop), None)
            if split is not None:
                return split
            start = stop
            width = min(2 * width, LONGEST_SEARCH)
        return None

    def last(self, text: str) -> int | None:
        """Return the last p with a safe split between text[:p] and text[p:]."""
        stop = len(text)
        width = FIRST_SEARCH
        while stop > 1:
            announce(width // COPIES_PER_TOKEN)
            start = max(1, stop - width)
            splits = deque(self._splits(text, start, stop), maxlen=1)
            if splits:
                return splits[0]
            stop = start
            width = min(2 * width, LONGEST_SEARCH)
        return None

    def _splits(self, text: str, start: int, stop: int) -> Iterator[int]:
        """Yield every safe p with start <= p < stop."""
        # The lookahead finds overlapping pairs.
        for match in re.compile(f"(?={PAIR.pattern})").finditer(text, start - 1, stop):
            p = match.start() + 1
            if self._is_safe(text[p - 1 : p + 1]):
                yield p

    def _is_safe(self, pair: str) -> bool:
        """Return True if the split inside this match of `PAIR` is safe."""
        left = pair[0]
        right = pair[1]
        if right not in self.rights or left in self.endings:
            return False
        normal = self.space if right == " " else right
        if pair in self.pairs or left + normal in self.pairs:
            return False
        if right in self.starts:
            return True
        return {left, normal} <= self.singles and left + normal not in self.merged


def find_boundaries(tokenizer: Tokenizer) -> Boundaries | None:
    """Return the safe splits of a tokenizer, or None if none can be proven."""
    normalizers = flat(tokenizer.normalizer, "normalizers")
    stages = flat(tokenizer.pre_tokenizer, "pretokenizers")
    space = image_of_space(normalizers) if normalizers is not None else None
    if stages is None or space is None or not is_deterministic(tokenizer.model):
        return None
    starts, still_open = pretoken_starts(stages, space)
    if any(stage["type"] == "Metaspace" for stage in stages):
        space = META
    vocab = _vocabulary(tokenizer) if still_open else []
    rights = starts | still_open if vocab else starts
    if not rights:
        return None
    added = list(added_contents(tokenizer))
    return Boundaries(
        rights,
        starts,
        space,
        endings=frozenset(content[-1] for content in added),
        pairs=_pairs(added, space),
        singles=frozenset(entry for entry in vocab if len(entry) == 1),
        merged=_pairs(vocab, space),
    )


def flat(component: Any, parts: str) -> list[Mapping[str, Any]] | None:
    """Return a tokenizer's component as a list of the parts in its JSON; None if it has no JSON.

    Args:
        component: a normalizer, pre-tokenizer or post-processor, possibly a sequence of them.
        parts: name of the list in a sequence of such components.
    """
    if component is None:
        return []
    try:
        state = json.loads(component.__getstate__())
    except Exception:  # noqa: BLE001  (raised by the library for a component written in Python)
        return None
    return list(_leaves(state, parts))


def _leaves(state: Mapping[str, Any], parts: str) -> Iterator[Mapping[str, Any]]:
    if state["type"] != "Sequence":
        yield state
        return
    for part in state[parts]:
        yield from _leaves(part, parts)


def image_of_space(normalizers: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the character into which the normalizers turn ' '; None if one of them is unknown."""
    space = " "
    for normalizer in normalizers:
        match normalizer:
            case {"type": "NFC"} | {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                space = META
            case _:
                return None
    return space


def is_deterministic(model: object) -> bool:
    """Return True if a text always gets the same ids: no dropout, no sampling."""
    if isinstance(model, models.BPE):
        return not model.dropout
    # Newer versions can sample, by an attribute that tokenizer.json cannot set.
    sampled = getattr(model, "alpha", None) or getattr(model, "nbest_size", None)
    return isinstance(model, models.Unigram) and not sampled


def _vocabulary(tokenizer: Tokenizer) -> list[str]:
    """Return the entries of a BPE vocabulary if step 4 applies to it, else an empty list."""
    model = tokenizer.model
    if not isinstance(model, models.BPE) or model.ignore_merges:
        return []
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return []
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    return list(vocab) if len(set(vocab.values())) == len(vocab) else []


def added_contents(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the contents of all added tokens, raw and normalized."""
    for token in tokenizer.get_added_tokens_decoder().values():
        yield token.content
        if tokenizer.normalizer is not None:
            yield tokenizer.normalizer.normalize_str(token.content) or token.content


def _pairs(texts: Iterable[str], space: str) -> frozenset[str]:
    """Return all pairs of neighbours in the texts whose second character may follow a split."""
    # A NUL, which is never left of a split, separates texts. The lookahead finds overlapping pairs.
    pattern = re.compile(f"(?s)(?=(.[{re.escape(''.join(RIGHTS) + space)}]))")
    return frozenset(pattern.findall("\0".join(texts)))
