"""Heads of requests: checks that llhttp leaves to its user."""

import re

from gpuscore.errors import InvalidRequest
from gpuscore.types.record import Headers

END = b"\r\n\r\n"  # of a head, and of a body in chunks
# Empty lines, a request line and fields as RFC 9112 defines them, without lines that are folded.
_HEAD = re.compile(
    rb"(?:\r\n)*+[A-Z-]{1,20}+ /[!\"$-~]*+ HTTP/1\.[01]\r\n"
    rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]++:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n)*+\r\n"
)
_BEGINNING = re.compile(
    rb"(?:\r\n)*+(?:\r?\Z|[A-Z-]{1,20}(?: |\Z))"
)  # as much of a method as has arrived
_BARE = re.compile(rb"(?<!\r)\n|\r(?=[^\n])")
_UPGRADE = re.compile(rb"^upgrade:", re.IGNORECASE | re.MULTILINE)
_IGNORED = b"upgrade-ignored:"  # the application sees the field by this name
# RFC 9112 (3.2): a Host field that is not a host with an optional port gets 400. A host is a
# reg-name of RFC 3986 (3.2.2) or an address in brackets.
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+;=%-]*)(:[0-9]*)?")


def invalid() -> InvalidRequest:
    return InvalidRequest("the request is not valid HTTP")


def check_beginning(data: bytearray, start: int) -> None:
    """Raise InvalidRequest if a head that begins so, checked up to `start`, cannot be valid."""
    if _BARE.search(data, start) or not _BEGINNING.match(data):
        raise invalid()


def readable(head: bytes) -> bytes:
    """Return a whole head without the upgrade at which llhttp would stop; raise InvalidRequest."""
    if not _HEAD.fullmatch(head):
        raise invalid()
    return _UPGRADE.sub(_IGNORED, head) if b"pgrade" in head.lower() else head


def body_length(headers: Headers, version: str) -> int | None:
    """Return the bytes of the body after a head that llhttp has parsed; None if it is in chunks.

    Raises InvalidRequest for a Host or a coding that a proxy could understand differently.
    """
    hosts, length, chunked = 0, 0, False
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if not _HOST.fullmatch(value):
                raise invalid()
        elif name == b"content-length":
            length = int(value)  # llhttp has checked the digits, and that the field is unique
        elif name == b"transfer-encoding":
            chunked = True
            if value.lower() != b"chunked" or version == "1.0":  # RFC 9112 (6.1)
                raise invalid()
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        raise invalid()
    return None if chunked else length
