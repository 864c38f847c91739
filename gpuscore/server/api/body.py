"""Reads a request body under a byte cap; never through the framework's parser."""

from starlette.requests import Request

from gpuscore.config import ServerConfig
from gpuscore.errors import BodyTooLarge, UnsupportedMediaType


def check_content_type(request: Request) -> None:
    """Raises UnsupportedMediaType unless the body is plain JSON in UTF-8."""
    kind, *parameters = request.headers.get("content-type", "").lower().split(";")
    charset = [p.strip() for p in parameters if p.strip()]
    if kind.strip() != "application/json" or charset not in ([], ["charset=utf-8"]):
        raise UnsupportedMediaType("the content type must be application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaType("content encodings are not supported")


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """The whole body. How long it may take is the connection's affair, and so is reading on after
    an answer that came before its end.

    Raises:
        BodyTooLarge: more than `max_body_bytes`, announced or sent.
        Overloaded: more bodies are in flight than there is memory for.
        ClientDisconnect: the client left.
    """
    limit = config.max_body_bytes
    announced = request.headers.get("content-length")
    if announced is not None and int(announced) > limit:  # the HTTP parser saw to the digits
        raise BodyTooLarge(f"the body is over {limit} bytes")
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise BodyTooLarge(f"the body is over {limit} bytes")
    return b"".join(parts)
