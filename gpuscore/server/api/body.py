"""Request bodies, read up to a limit of bytes and never by the framework's parser."""

import asyncio
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError
from starlette.requests import Request
from starlette.types import Scope

from gpuscore.config import ServerConfig
from gpuscore.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType
from gpuscore.server.http.exchange import MORE

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


def check_content_type(request: Request) -> None:
    """Raise UnsupportedMediaType unless the head announces JSON in UTF-8, in a known encoding."""
    kind, *parameters = request.headers.get("content-type", "").lower().split(";")
    if kind.strip().startswith("multipart/"):
        raise UnsupportedMediaType(
            "multipart bodies carry assets, and this server reads no images: the content type must "
            "be application/json"
        )
    charset = [p.strip() for p in parameters if p.strip()]
    if kind.strip() != "application/json" or charset not in ([], ["charset=utf-8"]):
        raise UnsupportedMediaType("the content type must be application/json")
    check_encoding(request.headers.getlist("content-encoding"))


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """Return the whole body, unpacked.

    The connection enforces the timeout, and drops the rest of a body that was answered early.

    Raises:
        BodyTooLarge: more than `max_body_bytes`, announced, sent or unpacked.
        InvalidRequest: the body is not in its content encoding.
        Overloaded: the bodies in flight exceed `max_queued_bytes`.
        ClientDisconnect: the client left.
    """
    limit = config.max_body_bytes
    announced = request.headers.get("content-length")
    if announced is not None and int(announced) > limit:  # the HTTP parser checked the digits
        raise BodyTooLarge(f"the body is over {limit} bytes")
    reader = unpacker(check_encoding(request.headers.getlist("content-encoding")))
    parts, size, received = [], 0, 0
    async for part in request.stream():
        received += len(part)
        if received > limit:
            raise BodyTooLarge(f"the body is over {limit} bytes")
        if reader is None:
            parts.append(part)
            continue
        for piece in reader.pieces(part):
            size += len(piece)
            if size > limit:
                raise BodyTooLarge(f"the unpacked body is over {limit} bytes")
            count(request.scope, len(piece))
            parts.append(piece)
            if len(piece) == PIECE:
                await asyncio.sleep(0)
    check_ended(reader)
    return b"".join(parts)


def count(scope: Scope, size: int) -> None:
    """Count bytes that the connection does not see; raise Overloaded if there are too many."""
    refusal = scope["state"].get(MORE, lambda _: None)(size)
    if refusal is not None:
        raise refusal
