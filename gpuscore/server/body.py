"""Reads a request body under a byte cap and a deadline; never through the framework's parser."""

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request

from gpuscore.config import ServerConfig
from gpuscore.errors import BodyTooLarge, RequestTimeout, UnsupportedMediaType

_DISCARD_SECONDS = 2.0  # given to a client that is still sending when it is refused


def check_content_type(request: Request) -> None:
    """Raises UnsupportedMediaType unless the body is plain JSON in UTF-8."""
    kind, *parameters = request.headers.get("content-type", "").lower().split(";")
    charset = [p.strip() for p in parameters if p.strip()]
    if kind.strip() != "application/json" or charset not in ([], ["charset=utf-8"]):
        raise UnsupportedMediaType("the content type must be application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaType("content encodings are not supported")


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """The whole body.

    Raises:
        BodyTooLarge: more than `max_body_bytes`, announced or sent.
        RequestTimeout: not complete after `body_timeout` seconds.
        ClientDisconnect: the client left.
    """
    limit = config.max_body_bytes
    stream = request.stream()
    announced = request.headers.get("content-length")
    if announced is not None and int(announced) > limit:  # the HTTP parser saw to the digits
        raise await _too_large(stream, limit)
    try:
        async with asyncio.timeout(config.body_timeout):
            body = bytearray()
            async for part in stream:
                body += part
                if len(body) > limit:
                    break
    except TimeoutError:
        raise RequestTimeout(
            f"the body was not complete after {config.body_timeout:g} seconds"
        ) from None
    if len(body) > limit:
        raise await _too_large(stream, limit)
    return bytes(body)


async def _too_large(stream: AsyncIterator[bytes], limit: int) -> BodyTooLarge:
    """Read on for a moment, or the client would see a reset instead of the answer."""
    try:
        async with asyncio.timeout(_DISCARD_SECONDS):
            async for _ in stream:
                pass
    except TimeoutError:
        pass
    return BodyTooLarge(f"the body is over {limit} bytes")
