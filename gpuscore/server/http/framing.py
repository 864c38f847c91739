"""Spans: pieces of the input that can be parsed without going past the end of a request.

A span ends where a request can end: at a line of the head, at a body's last byte, or at the empty
line after the chunks. The HTTP parser gets one span at a time and must find the same end. Later
bytes stay unparsed until the connection is free for the next request.
"""

import re
from typing import Protocol

from gpuscore.errors import HeaderTooLarge, InvalidRequest

EMPTY_LINE = b"\r\n"
CHUNKS = 128  # chunks in one span, so that parsing a span takes a bounded time

_BLANK = re.compile(rb"[\r\n]*")
# The start of a request line: as much of the method's name as has arrived.
_BEGINNING = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}(?: |\Z)")
# 16 digits are enough for any length that the parser takes; more could only be leading zeros.
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(;[^\n]*)?\r\n")
_SIZE_DIGITS = 18  # bytes of a size line without extensions, at most


class Framing(Protocol):
    """A rule that divides a head or a body into spans."""

    ended: bool  # the last span completed the head or body

    def span(self, data: bytearray) -> int:
        """Return how many bytes of `data` may be parsed now; 0 if more bytes are needed to tell.

        Raises HeaderTooLarge or InvalidRequest if further bytes cannot make the request valid.
        """


class HeadFraming:
    """Spans of a head: whole lines, or all of them at once if the head is complete.

    Args:
        room: the most bytes that the head may have, with the empty lines before it.
    """

    __slots__ = ("_room", "begun", "ended", "used")

    def __init__(self, room: int) -> None:
        self.ended = False
        self.used = 0
        self.begun = False  # the spans so far contain lines of the head
        self._room = room

    def span(self, data: bytearray) -> int:
        size = self._size(data)
        if self.used + (size or len(data)) > self._room:
            raise HeaderTooLarge(f"the request head is over {self._room} bytes")
        self.used += size
        return size

    def _size(self, data: bytearray) -> int:
        if data[0] in EMPTY_LINE:
            if not self.begun:  # between two requests
                return len(_BLANK.match(data)[0])  # type: ignore[index]  # it matches anything
            if data.startswith(EMPTY_LINE):
                self.ended = True
                return len(EMPTY_LINE)
        end = data.find(b"\r\n\r\n")
        self.ended = end >= 0
        size = end + 4 if self.ended else data.rfind(b"\n") + 1
        if not (size or self.begun or _BEGINNING.match(data)):
            raise InvalidRequest("the request is not valid HTTP")
        self.begun = self.begun or size > 0
        return size


class LengthFraming:
    """Spans of a body whose length was announced by Content-Length."""

    __slots__ = ("_left", "ended")

    def __init__(self, length: int) -> None:
        self.ended = length == 0
        self._left = length

    def span(self, data: bytearray) -> int:
        size = min(self._left, len(data))
        self._left -= size
        self.ended = not self._left
        return size


class ChunkFraming:
    """Spans of a chunked body and its trailer fields.

    Args:
        limit: the most bytes that head, chunk extensions and trailer fields may have together.
        used: bytes of the head.
    """

    def __init__(self, limit: int, used: int) -> None:
        self.ended = False
        self._limit, self._used = limit, used
        self._left = 0  # bytes of the current chunk, with its line end, that have not arrived
        self._last = False  # the chunk of size zero has arrived

    def span(self, data: bytearray) -> int:
        at = self._take(len(data))
        for _ in range(CHUNKS):
            if self._left or self.ended:
                break
            line = self._trailer_line(data, at) if self._last else self._size_line(data, at)
            if not line:
                break
            at += line
            at += self._take(len(data) - at)
        return at

    def _take(self, there: int) -> int:
        """Take the current chunk's bytes from the `there` bytes that have arrived; count them."""
        part = min(self._left, there)
        self._left -= part
        return part

    def _size_line(self, data: bytearray, at: int) -> int:
        """Return the length of the size line at `at`; 0 if its end has not arrived."""
        match = _SIZE.match(data, at)
        if match is None:
            if data.find(b"\n", at) >= 0:
                raise InvalidRequest("the request is not valid HTTP")
            self._check(len(data) - at - _SIZE_DIGITS)
            return 0
        if match[2]:
            self._count(len(match[2]))
        length = int(match[1], 16)
        self._last = length == 0
        self._left = length + len(EMPTY_LINE) if length else 0
        return match.end() - at

    def _trailer_line(self, data: bytearray, at: int) -> int:
        """Take a trailer field, or the empty line that ends the body; count its bytes."""
        size = data.find(b"\n", at) + 1 - at
        if size <= 0:
            self._check(len(data) - at)
            return 0
        self.ended = data.startswith(EMPTY_LINE, at)
        self._count(size)
        return size

    def _count(self, size: int) -> None:
        self._check(size)
        self._used += size

    def _check(self, more: int) -> None:
        if self._used + more > self._limit:
            raise HeaderTooLarge(
                f"head, chunk extensions and trailer fields are over {self._limit} bytes"
            )
