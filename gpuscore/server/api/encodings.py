"""Content encodings of bodies: gzip and zstd, unpacked piece by piece as their bytes arrive.

A few bytes can unpack to a thousand times as many, so a limit on the bytes received says little.
Every limit counts unpacked bytes, and no more than one piece is unpacked before the next check.
"""

import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

from gpuscore.errors import InvalidRequest, UnsupportedMediaType

IDENTITY = "identity"
PIECE = 2**18  # most bytes that are unpacked before the event loop is free for others
GZIP = zlib.MAX_WBITS | 16  # zlib's flag for gzip's header and trailer
# RFC 9659: senders of zstd as a content encoding keep to windows of 8 MiB, which bounds memory.
WINDOW_LOG = 23


class Unpacker(Protocol):
    """A reader of one encoded body."""

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield what these bytes unpack to, at most PIECE bytes at a time.

        Raises:
            InvalidRequest: they are not what the encoding makes.
        """

    @property
    def ended(self) -> bool:
        """True once the encoded body is complete."""


class _Gzip:
    def __init__(self) -> None:
        self._inner = zlib.decompressobj(GZIP)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        piece = b""
        # zlib may hold back what did not fit the last piece.
        while data or (piece and not self._inner.eof):
            if self._inner.eof:
                raise _after_the_end("gzip")
            try:
                piece = self._inner.decompress(data, PIECE)
            except zlib.error:
                raise _corrupt("gzip") from None
            data = self._inner.unconsumed_tail or self._inner.unused_data
            if piece:
                yield piece

    @property
    def ended(self) -> bool:
        return self._inner.eof


class _Zstd:
    def __init__(self) -> None:
        limits = {int(DecompressionParameter.window_log_max): WINDOW_LOG}
        self._inner = ZstdDecompressor(options=limits)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        while data or not (self._inner.needs_input or self._inner.eof):
            if self._inner.eof:
                raise _after_the_end("zstd")
            try:
                piece = self._inner.decompress(data, max_length=PIECE)
            except ZstdError:
                raise _corrupt("zstd") from None
            data = self._inner.unused_data if self._inner.eof else b""
            if piece:
                yield piece

    @property
    def ended(self) -> bool:
        return self._inner.eof


_UNPACKERS: dict[str, Callable[[], Unpacker]] = {"gzip": _Gzip, "zstd": _Zstd}
ENCODINGS = tuple(_UNPACKERS)


def check_encoding(given: list[str]) -> str:
    """Return the encoding that these header fields name.

    Raises:
        UnsupportedMediaType: it is not supported, or there are several.
    """
    names = [name.strip().lower() for field in given for name in field.split(",")]
    found = [name for name in names if name != IDENTITY] or [IDENTITY]
    if len(found) > 1 or found[0] not in (IDENTITY, *ENCODINGS):
        raise UnsupportedMediaType(
            f"the content encoding must be {IDENTITY}, {' or '.join(ENCODINGS)}"
        )
    return found[0]


def unpacker(encoding: str) -> Unpacker | None:
    """Return the reader of a body in this encoding; None if it is not packed."""
    return None if encoding == IDENTITY else _UNPACKERS[encoding]()


def check_ended(reader: Unpacker | None) -> None:
    """Raise InvalidRequest if an encoded body is not complete."""
    if reader is not None and not reader.ended:
        raise InvalidRequest("the body ends before its content encoding does")


def _corrupt(encoding: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid {encoding}")


def _after_the_end(encoding: str) -> InvalidRequest:
    return InvalidRequest(f"the body goes on after the end of its {encoding} data")
