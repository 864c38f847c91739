"""How many of the bytes that came in may be parsed next, so that none behind a request's end are.

A span ends where a request can end: at a head's lines, at a body's last byte, at the empty line of
a chunked body. The HTTP parser is given one span at a time and has to see the same end. What is
behind waits, unparsed, until there is room for the next request.
"""

import re
from typing import Protocol

from gpuscore.errors import HeaderTooLarge, InvalidRequest

EMPTY_LINE = b"\r\n"
CHUNKS = 128  # of a chunked body in one span: what one turn costs has a bound

_BLANK = re.compile(rb"[\r\n]*")
# A request line's beginning: the method's name as far as it is there.
_BEGINNING = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}(?: |\Z)")
# 16 digits are enough for any length that the parser takes; more can only be zeros in front.
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(;[^\n]*)?\r\n")
_SIZE_DIGITS = 18  # bytes of a size line without extensions, at most


class Framing(Protocol):
    """Of a head or a body."""

    ended: bool  # the last span was its end

    def span(self, data: bytearray) -> int:
        """The bytes of `data` that may be parsed now; 0 if it takes more to know.

        Raises HeaderTooLarge or InvalidRequest where no more bytes would help.
        """


class HeadFraming:
    """Whole lines, all at once where the head is complete.

    Args:
        room: bytes of the head, at most, with the empty lines before it.
    """

    __slots__ = ("_room", "begun", "ended", "used")

    def __init__(self, room: int) -> None:
        self.ended = False
        self.used = 0
        self.begun = False  # some of its lines are parsed, or in the last span
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
    """A body of as many bytes as were announced."""

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
    """A body in chunks, and the fields behind it.

    Args:
        limit: bytes of head, chunk extensions and trailer fields together.
        used: bytes of the head.
    """

    def __init__(self, limit: int, used: int) -> None:
        self.ended = False
        self._limit, self._used = limit, used
        self._left = 0  # bytes of a chunk and the line's end behind it that are still to come
        self._last = False  # the chunk of size zero was there

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
        """Bytes of the chunk, out of those that are there."""
        part = min(self._left, there)
        self._left -= part
        return part

    def _size_line(self, data: bytearray, at: int) -> int:
        """The length of the line at `at`; 0 if its end is not there."""
        found = _SIZE.match(data, at)
        if found is None:
            if data.find(b"\n", at) >= 0:
                raise InvalidRequest("the request is not valid HTTP")
            self._check(len(data) - at - _SIZE_DIGITS)
            return 0
        if found[2]:
            self._count(len(found[2]))
        length = int(found[1], 16)
        self._last = length == 0
        self._left = length + len(EMPTY_LINE) if length else 0
        return found.end() - at

    def _trailer_line(self, data: bytearray, at: int) -> int:
        """The same for a field behind the last chunk, or the empty line."""
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
