"""The request target: its path in one canonical form for the whole server, and its query."""

import re

from gpuscore.errors import InvalidRequest

# RFC 9112, 3.2.2: the absolute form, as sent to a proxy. No answer depends on the server's name, so
# the authority is checked and dropped, like the Host field.
_ABSOLUTE = re.compile(rb"https?://[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]+(?=[/?]|\Z)", re.IGNORECASE)
# RFC 3986, 2.3: letters, digits, "-", ".", "_" and "~" mean the same whether encoded or not.
_ENCODED = re.compile(rb"%(2D|2E|3[0-9]|4[1-9A-F]|5[0-9A]|5F|6[1-9A-F]|7[0-9A]|7E)", re.IGNORECASE)


def read_target(method: bytes, target: bytes) -> tuple[str, bytes]:
    """Return a target's path and query (without "?").

    In the path, only characters that need no percent-encoding are decoded. So two paths are equal
    where RFC 3986 says that they are, and "%2F" is no slash.

    Raises:
        InvalidRequest: neither a path, nor an http or https URL, nor the "*" of OPTIONS.
    """
    if not target.startswith(b"/"):
        target = _origin_form(method, target)
    path, _, query = target.partition(b"?")
    if b"%" in path:
        path = _ENCODED.sub(lambda found: bytes.fromhex(found[1].decode()), path)
    return path.decode("latin-1"), query


def _origin_form(method: bytes, target: bytes) -> bytes:
    if target == b"*" and method == b"OPTIONS":
        return target
    found = _ABSOLUTE.match(target)
    if found is None:
        raise InvalidRequest("the request target must be a path or an http URL")
    rest = target[found.end() :]
    return rest if rest.startswith(b"/") else b"/" + rest
