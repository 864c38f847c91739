"""Where a query may be cut so that what stands beside the cut is tokenised once.

A cut between the characters l and r of a text is *safe* if for all texts X that end with l and Y
that begin with r (both without special tokens of the post-processor)

    ids(XY) = ids(X) + t(Y)    with    t(Y) = ids(lY) without its first len(ids(l))

so that t(Y) depends on Y and l only. l stays in front of Y as a guard: Y never looks like the
beginning of a text, where normalizers and pre-tokenizers may put a prefix.

Proof sketch, in the order in which a tokenizer works. Each step shows that what happens on either
side of the cut is the same in XY, in X (or l) alone and in lY.

1. *Added tokens* are searched first in the text, then, those with `normalized`, in the normalized
   pieces between; leftmost, longest, never overlapping. No added token holds l before r, so none
   lies across the cut, and the search stands at the cut or before it in any case. None ends with l,
   so the piece that ends X also begins Y: l and r are in one piece, which does not begin at the
   cut. l is no white space, so that `lstrip` of a token in Y and `rstrip` of a token in X stop
   before the cut. `single_word` looks at one character on either side: for a token in X that is l
   at the latest, for a token in Y it is l at the earliest, and both are there on either side. The
   contents are looked at raw and normalized, whatever the token says.
2. *Normalizers*, piece by piece. NFC: r is a starter that composes with nothing before it, so NFC
   works apart on the two sides; l and r stay themselves (`pretokens.LETTERS`). Replace ' ' by META:
   one character at a time. Prepend: at the beginning of a piece, which is not at the cut.
3. *Pre-tokenizers*: `pretokens.pretoken_starts`. Where a pre-token surely starts at r, every model
   works apart on the sides, as pre-tokens are given to it one by one.
4. *BPE inside a pre-token* (SentencePiece style). If l and r are entries of the vocabulary, their
   symbols are never dropped, never bytes, and never fused with an unknown neighbour: l ends a run
   of unknown characters (`fuse_unk`) and r begins after none. A symbol's text is the text of what
   was merged into it, so the last symbol left of the cut ends with l and the first right of it
   begins with r; their merge would be an entry that holds l before r. There is none, so no merge
   crosses, and merges on one side see no more of the other than that. Their order (rank, then
   position) is the same on either side. This needs a vocabulary with one text per id, no affixes
   of words, and no `ignore_merges`, which would ask whether X alone is an entry.
   *Unigram* inside a pre-token is left out: without an entry across the cut its best path does fall
   into two, but scores are added up from the beginning, and rounding may decide near-ties in Y
   differently behind another X.

Anything else (dropout, a Precompiled normalizer, an unknown regex, ...) has no safe cut.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models

from gpuscore.text.pretokens import META, PAIR, RIGHTS, pretoken_starts
from gpuscore.text.turns import ALONE, COPIED, Turns

NEAR, FAR = 64, 1 << 16  # characters searched for a cut at a time, first and at most


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The safe cuts of one tokenizer, each told by the two characters around it.

    Args:
        rights: every r that may stand behind a cut.
        starts: those of them at which a pre-token surely starts; the others need `singles`.
        space: what the normalizer makes of ' '.
        endings: last characters of added tokens.
        pairs: two characters within an added token, the second one of `rights` (or `space`).
        singles: one-character entries of the vocabulary.
        merged: two characters within an entry, the second one of `rights` (or `space`).
    """

    rights: frozenset[str]
    starts: frozenset[str]
    space: str
    endings: frozenset[str]
    pairs: frozenset[str]
    singles: frozenset[str]
    merged: frozenset[str]

    def first(self, text: str, start: int = 1, turns: Turns = ALONE) -> int | None:
        """The first p from `start` on at which text[:p] and text[p:] are safely apart."""
        width = NEAR
        while start < len(text):
            turns.before(width // COPIED)
            stop = min(start + width, len(text))
            found = next(self._cuts(text, start, stop), None)
            if found is not None:
                return found
            start, width = stop, min(2 * width, FAR)
        return None

    def last(self, text: str, turns: Turns = ALONE) -> int | None:
        """The last p at which text[:p] and text[p:] are safely apart."""
        stop, width = len(text), NEAR
        while stop > 1:
            turns.before(width // COPIED)
            start = max(1, stop - width)
            found = deque(self._cuts(text, start, stop), maxlen=1)
            if found:
                return found[0]
            stop, width = start, min(2 * width, FAR)
        return None

    def _cuts(self, text: str, start: int, stop: int) -> Iterator[int]:
        """Every safe p with start <= p < stop."""
        # Lookahead, because pairs overlap.
        for match in re.compile(f"(?={PAIR.pattern})").finditer(text, start - 1, stop):
            p = match.start() + 1
            if self._safe(text[p - 1 : p + 1]):
                yield p

    def _safe(self, pair: str) -> bool:
        """Whether one of `PAIR` is a safe cut."""
        left, right = pair[0], pair[1]
        if right not in self.rights or left in self.endings:
            return False
        normal = self.space if right == " " else right
        if pair in self.pairs or left + normal in self.pairs:
            return False
        if right in self.starts:
            return True
        return {left, normal} <= self.singles and left + normal not in self.merged


def find_boundaries(tokenizer: Tokenizer) -> Boundaries | None:
    """The safe cuts of a tokenizer, or None if none can be proven."""
    normalizers = flat(tokenizer.normalizer, "normalizers")
    stages = flat(tokenizer.pre_tokenizer, "pretokenizers")
    space = _image_of_space(normalizers) if normalizers is not None else None
    if stages is None or space is None or not _is_deterministic(tokenizer.model):
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
    """A tokenizer's component as in tokenizer.json, sequences resolved; None if it has no JSON.

    Args:
        parts: what a sequence of such components calls its list.
    """
    if component is None:
        return []
    try:
        state = json.loads(component.__getstate__())
    except Exception:  # noqa: BLE001  the library's own, for a component written in Python
        return None
    return list(_leaves(state, parts))


def _leaves(state: Mapping[str, Any], parts: str) -> Iterator[Mapping[str, Any]]:
    if state["type"] != "Sequence":
        yield state
        return
    for part in state[parts]:
        yield from _leaves(part, parts)


def _image_of_space(normalizers: Iterable[Mapping[str, Any]]) -> str | None:
    """What becomes of ' '; None if one of the normalizers is not understood."""
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


def _is_deterministic(model: object) -> bool:
    """The same ids every time: no dropout, no sampling."""
    if isinstance(model, models.BPE):
        return not model.dropout
    # Newer versions can sample; an attribute only, tokenizer.json cannot ask for it.
    sampled = getattr(model, "alpha", None) or getattr(model, "nbest_size", None)
    return isinstance(model, models.Unigram) and not sampled


def _vocabulary(tokenizer: Tokenizer) -> list[str]:
    """Entries of a BPE vocabulary to which step 4 applies, else nothing."""
    model = tokenizer.model
    if not isinstance(model, models.BPE) or model.ignore_merges:
        return []
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return []
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    return list(vocab) if len(set(vocab.values())) == len(vocab) else []


def added_contents(tokenizer: Tokenizer) -> Iterator[str]:
    """Contents of all added tokens, as they are and normalized."""
    for token in tokenizer.get_added_tokens_decoder().values():
        yield token.content
        if tokenizer.normalizer is not None:
            yield tokenizer.normalizer.normalize_str(token.content) or token.content


def _pairs(texts: Iterable[str], space: str) -> frozenset[str]:
    """Two characters side by side within one of the texts, if the second may stand behind a cut."""
    # Between texts a NUL, which is never left of a cut. Lookahead, because pairs overlap.
    found = re.compile(f"(?s)(?=(.[{re.escape(''.join(RIGHTS) + space)}]))")
    return frozenset(found.findall("\0".join(texts)))
