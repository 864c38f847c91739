"""The number of a JSON body's values, counted before any of them is made.

A value of two bytes becomes an object of up to a hundred, so a body far over every limit would take
gigabytes before the limits are looked at.
"""

from collections.abc import Iterator

from gpuscore.config import RequestLimits
from gpuscore.errors import TooManyItems

PIECE = 2**16  # bytes that are counted in one call
SPARE = 2**16  # values of fields that no limit counts
_BEGINS = (b",", b"[", b"{")  # each value but the first of its list or object follows a comma


def check_values(body: bytes, limits: RequestLimits) -> None:
    """Raise TooManyItems for a body with more values than any request within the limits has."""
    most = limits.max_request_tokens + limits.max_items * (1 + limits.max_labels) + SPARE
    if sum(map(body.count, _BEGINS)) <= most:  # with those inside of texts
        return
    values = 0
    for piece in _outside_of_texts(body):
        values += sum(map(piece.count, _BEGINS))
        if values > most:
            raise TooManyItems(f"the body has over {most} values, more than the limits allow")


def _outside_of_texts(body: bytes) -> Iterator[bytes]:
    """Yield what stands outside of a body's texts, in pieces."""
    start, inside = 0, 0
    while start < len(body):
        piece = body[start : start + PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # what is escaped stays with its backslash
            piece = body[start : start + PIECE + 1]
        start += len(piece)
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= len(parts) % 2 == 0
