"""JSON of large answers, made in short pieces; and the most bytes that parts of answers can have.

A piece is made within about a millisecond, so a thread that makes one delays no other for longer.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from time import monotonic
from typing import Any

import msgspec

from gpuscore.types.item_errors import ItemError

NUMBERS = 4096  # numbers of a piece
ROWS = 512  # rows of a piece that have several fields
QUESTIONS = 8  # typed questions of a piece
CHARS = 2**16  # characters of a piece
SPELL = 0.001  # seconds after which `next_part` ends
# In the place of a list or a text that `in_pieces` fills in. No JSON holds this byte.
_HOLE = b"\0"
HOLE: Any = msgspec.Raw(_HOLE)

NUMBER_BYTES = 25  # of a float64, such as -2.2250738585072014e-308, and a comma
COUNT_BYTES = 12  # of a count, an index or a token id below 2**31, and a comma
FRAME_BYTES = 2048  # of the fields that every answer has: names, ids, usage
_CHAR_BYTES = 6  # of \u0000; every other character takes less


def in_pieces(answer: object, *parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the JSON of an answer whose holes are filled with these parts, in their order."""
    first, *others = msgspec.json.encode(answer).split(_HOLE)
    yield first
    for part, after in zip(parts, others, strict=True):
        yield from part
        yield after


def list_json(rows: Iterable[object], size: int = NUMBERS) -> Iterator[bytes]:
    """Yield the JSON of a list, `size` entries at a time."""
    rows, before = iter(rows), b"["
    while some := list(islice(rows, size)):
        yield before + msgspec.json.encode(some)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"


def object_json(entries: Iterable[tuple[str, object]], size: int) -> Iterator[bytes]:
    """Yield the JSON of an object, `size` entries at a time."""
    entries, before = iter(entries), b"{"
    while some := dict(islice(entries, size)):
        yield before + msgspec.json.encode(some)[1:-1]
        before = b","
    yield b"{}" if before == b"{" else b"}"


def text_json(*texts: str) -> Iterator[bytes]:
    """Yield the JSON of these texts as one, CHARS characters at a time."""
    yield b'"'
    for text in texts:
        for start in range(0, len(text), CHARS):
            yield msgspec.json.encode(text[start : start + CHARS])[1:-1]
    yield b'"'


def next_part(pieces: Iterator[bytes]) -> bytes | None:
    """Return the next pieces, made within about SPELL and joined; None at the end."""
    made: list[bytes] = []
    end = monotonic() + SPELL
    for piece in pieces:
        made.append(piece)
        if monotonic() > end:
            break
    return b"".join(made) if made else None


def text_bytes(*texts: str | None) -> int:
    """Return the most bytes of JSON that texts take, each with a comma; None is null."""
    return sum(4 if text is None else _CHAR_BYTES * len(text) for text in texts) + 3 * len(texts)


def value_bytes(value: object) -> int:
    """Return the most bytes that a decoded value takes as JSON again, with a comma."""
    if isinstance(value, str):
        return text_bytes(value)
    if isinstance(value, dict):
        return 3 + sum(text_bytes(name) + value_bytes(one) for name, one in value.items())
    if isinstance(value, list):
        return 3 + sum(map(value_bytes, value))
    return NUMBER_BYTES + (value.bit_length() // 3 if isinstance(value, int) else 0)


def error_bytes(errors: Sequence[ItemError] | None) -> int:
    """Return the most bytes of the errors of single items."""
    return sum(64 + text_bytes(one.code, one.message) for one in errors or ())
