"""Texts in pieces of bounded size, and limits that are found out on the way."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from gpuscore.text.boundaries import Boundaries
from gpuscore.text.turns import Turns

# Characters handed to the tokenizer at a time, some 20 ms of work: others wait for no more.
PIECE_CHARS = 1 << 16


class OverLimit(Exception):
    """A text has more tokens than its limit: `least` or more."""

    def __init__(self, least: int) -> None:
        super().__init__(f"{least} tokens or more")
        self.least = least


def is_long(text: str) -> bool:
    """Whether it is worked on by itself, and in pieces where that can be."""
    return len(text) > PIECE_CHARS


def pieces(text: str, boundaries: Boundaries | None, turns: Turns) -> Iterator[tuple[int, str]]:
    """A text in pieces of about PIECE_CHARS whose ids, one after the other, are the whole text's.

    Where there is no safe cut a piece is longer. Every piece but the first begins with the
    character before the cut, its guard, whose ids are to be dropped: with XYZ cut safely behind X
    and behind Y, ids(XYZ) = ids(X) + t(YZ), and t(YZ), which is ids(lYZ) without the guard's, is
    t(Y) + t(Z), because lYZ is cut safely behind lY.

    Returns:
        Where a piece begins in the text, and the piece.
    """
    start = 0
    while True:
        end = None
        if boundaries is not None and len(text) - start > PIECE_CHARS:
            end = boundaries.first(text, start + PIECE_CHARS, turns)
        begin, end = max(0, start - 1), end or len(text)
        turns.before(end - begin)
        yield begin, text[begin:end]
        if end == len(text):
            return
        start = end


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Runs of texts of up to PIECE_CHARS together; a longer one is by itself."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > PIECE_CHARS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
        if is_long(text):  # at once, because it may be refused
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def beside(around: int, limit: int | None) -> Iterator[int | None]:
    """What is left of a limit for texts beside which so many tokens stand; OverLimit counts
    them."""
    try:
        yield None if limit is None else limit - around
    except OverLimit as over:
        raise OverLimit(over.least + around) from None


def check_limit(least: int, limit: int | None) -> None:
    if limit is not None and least > limit:
        raise OverLimit(least)
