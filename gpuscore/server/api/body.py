"""Request bodies, read up to a limit of bytes and never by the framework's parser."""

import asyncio

from starlette.requests import Request
from starlette.types import Scope

from gpuscore.config import ServerConfig
from gpuscore.errors import BodyTooLarge, UnsupportedMediaType
from gpuscore.server.api.encodings import PIECE, check_encoding, check_ended, unpacker
from gpuscore.server.http.exchange import MORE


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
