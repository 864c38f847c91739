"""Request bodies, read up to a limit of bytes and never by the framework's parser."""

from starlette.requests import Request

from gpuscore.config import ServerConfig
from gpuscore.errors import BodyTooLarge, UnsupportedMediaType


def check_content_type(request: Request) -> None:
    """Raise UnsupportedMediaType unless the head announces uncompressed JSON in UTF-8."""
    kind, *parameters = request.headers.get("content-type", "").lower().split(";")
    if kind.strip().startswith("multipart/"):
        raise UnsupportedMediaType(
            "multipart bodies carry assets, and this server reads no images: the content type must "
            "be application/json"
        )
    charset = [p.strip() for p in parameters if p.strip()]
    if kind.strip() != "application/json" or charset not in ([], ["charset=utf-8"]):
        raise UnsupportedMediaType("the content type must be application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaType("content encodings are not supported")


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """Return the whole body.

    The connection enforces the timeout, and drops the rest of a body that was answered early.

    Raises:
        BodyTooLarge: more than `max_body_bytes`, announced or sent.
        Overloaded: the bodies in flight exceed `max_queued_bytes`.
        ClientDisconnect: the client left.
    """
    limit = config.max_body_bytes
    announced = request.headers.get("content-length")
    if announced is not None and int(announced) > limit:  # the HTTP parser checked the digits
        raise BodyTooLarge(f"the body is over {limit} bytes")
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise BodyTooLarge(f"the body is over {limit} bytes")
    return b"".join(parts)
