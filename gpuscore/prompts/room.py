"""The room that a prompt leaves for a document, and documents cut to fill it."""

from gpuscore.text.controls import ControlToken
from gpuscore.text.pieces import OverLimit
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.text.turns import Turns

SURE = 8  # tokens: a document that leaves so many free fits, however it merges with its neighbours


class DocumentRoom:
    """The place of a document in the prompts of one query.

    Args:
        encoder: of the part of the prompt with the document.
        head, tail: the text before and after the document in that part.
        limit: tokens of that part.
        turns: called before every piece of work.

    Raises:
        OverLimit: there is no room even without a document.
    """

    def __init__(
        self, encoder: TextEncoder, head: str, tail: str, limit: int, turns: Turns
    ) -> None:
        self._encoder, self._tail, self._limit, self._turns = encoder, tail, limit, turns
        self._free = limit - len(encoder.plain_ids(head + tail, turns, limit))
        self._text = tail
        self._joined = encoder.joined_from(head, lambda _: [self._text], False, turns, limit)

    def cut(self, document: str) -> str | None:
        """Return the document if it fits, else its longest beginning of whole tokens that does.

        Return None if not even one token fits.
        """
        if self._free > SURE and self._first(document, self._free - SURE) == document:
            return document
        fits, over, count = 0, len(document) + 1, max(1, self._free)  # in tokens
        while over - fits > 1:
            short = self._first(document, count)
            try:
                excess = self._excess(short)
            except ControlToken:
                return document  # refused with its place when its prompt is made
            if excess <= 0 and short == document:
                return document
            fits, over = (count, over) if excess <= 0 else (fits, count)
            count = min(max(fits + 1, count - (excess or -1)), over - 1)
        return self._first(document, fits) if fits else None

    def _first(self, document: str, count: int) -> str:
        return self._encoder.first_tokens(document, count, self._turns)

    def _excess(self, document: str) -> int:
        """Return by how many tokens the part with this document is too long."""
        self._text = f"{document}{self._tail}"
        try:
            return len(next(self._joined(0))) - self._limit
        except OverLimit as over:
            return over.least - self._limit
