"""Work on long texts in pieces of bounded size: between two pieces a scheduler may pause it or stop
it, and limits on tokens are checked.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class Turns:
    """A cooperative scheduler's handle; this base class has no scheduler and never waits.

    Work on long text calls `before` before each piece. The server's subclass then may run other
    requests' text work first, and stops the work of a request that was given up.
    """

    def before(self, characters: int) -> None:
        """Announce a piece of work that takes as long as tokenising `characters` characters.

        The call may block while the text work of other requests runs.

        Raises:
            DeadlineExceeded: the request was given up; its work must stop.
        """


ALONE = Turns()  # for callers without a scheduler
COPIED = 16  # tokens or characters that are copied or searched in the time that one is tokenised
# Characters that the tokenizer gets at a time. A piece cannot be interrupted and takes some 20 ms.
PIECE_CHARS = 1 << 16
# A text takes as long as that many characters besides its own, for the objects that are made.
PER_TEXT = 100

Cut = Callable[[str, int, Turns], int | None]


class OverLimit(Exception):
    """A text has more tokens than its limit: at least `least`."""

    def __init__(self, least: int) -> None:
        super().__init__(f"{least} tokens or more")
        self.least = least


def is_long(text: str) -> bool:
    """Return True if the text is encoded by itself, in pieces if it has safe cuts."""
    return len(text) > PIECE_CHARS


def pieces(text: str, cut: Cut | None, turns: Turns) -> Iterator[tuple[int, str]]:
    """Split a text into pieces of about PIECE_CHARS whose ids, concatenated, are the text's ids.

    Without a safe cut a piece is longer. Every piece after the first begins with the character
    before the cut, its guard, whose ids must be dropped. This is correct: let XYZ have safe cuts
    after X and after Y. Then ids(XYZ) = ids(X) + t(YZ). t(YZ) is ids(lYZ) without the guard's ids,
    and this is t(Y) + t(Z), because lYZ has a safe cut after lY.

    Args:
        cut: returns the first safe cut from a place on (`Boundaries.first`).

    Yields:
        The position of a piece in the text, and the piece.
    """
    start = 0
    while True:
        end = None
        if cut is not None and len(text) - start > PIECE_CHARS:
            end = cut(text, start + PIECE_CHARS, turns)
        begin, end = max(0, start - 1), end or len(text)
        turns.before(end - begin)
        yield begin, text[begin:end]
        if end == len(text):
            return
        start = end


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group texts into batches that cost up to PIECE_CHARS; a text that is longer is alone."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) + PER_TEXT > PIECE_CHARS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text) + PER_TEXT
        if is_long(text):  # yielded before the next text is read, because it may be refused
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def cost(batch: Iterable[str]) -> int:
    """Return the characters in a text of which tokenising takes as long as that of the batch."""
    return sum(len(text) + PER_TEXT for text in batch)


@contextmanager
def beside(around: int, limit: int | None) -> Iterator[int | None]:
    """Yield the limit less `around` tokens that are added to each text; OverLimit counts them."""
    try:
        yield None if limit is None else limit - around
    except OverLimit as over:
        raise OverLimit(over.least + around) from None


def check_limit(least: int, limit: int | None) -> None:
    if limit is not None and least > limit:
        raise OverLimit(least)
