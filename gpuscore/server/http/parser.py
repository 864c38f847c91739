"""The parser of HTTP/1.1 requests: llhttp, plus the checks that it leaves to its user.

llhttp refuses requests that could smuggle another one (both lengths, two lengths, folded lines,
bare line feeds, white space before a colon, broken chunks). This module bounds how much llhttp
parses at a time (`framing`) and the bytes of a head, and checks the Host field and the HTTP
version. llhttp stops at methods that it does not know and at upgrades, which RFC 9110 (7.8) lets a
server ignore, so it gets both under a neutral name. Every byte is parsed once.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import httptools

from gpuscore.errors import BodyTooLarge, InvalidRequest
from gpuscore.server.http.framing import ChunkFraming, Framing, HeadFraming, LengthFraming

# RFC 9112, 3.2.2: the absolute form, as sent to a proxy. No answer depends on the server's name, so
# the authority is checked and dropped, like the Host field.
_ABSOLUTE = re.compile(rb"https?://[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]+(?=[/?]|\Z)", re.IGNORECASE)
# RFC 3986, 2.3: letters, digits, "-", ".", "_" and "~" mean the same whether encoded or not.
_ENCODED = re.compile(rb"%(2D|2E|3[0-9]|4[1-9A-F]|5[0-9A]|5F|6[1-9A-F]|7[0-9A]|7E)", re.IGNORECASE)


def read_target(method: bytes, target: bytes) -> tuple[str, bytes]:
    """Return a target's path and query (without "?").

    In the path, only characters that need no percent-encoding are decoded. So two paths are equal
    exactly if RFC 3986 calls them equivalent, and "%2F" is not a slash.

    Raises:
        InvalidRequest: neither a path, nor an http or https URL, nor the "*" of OPTIONS.
    """
    if not target.startswith(b"/"):
        target = _origin_form(method, target)
    path, _, query = target.partition(b"?")
    if b"%" in path:
        path = _ENCODED.sub(lambda match: bytes.fromhex(match[1].decode()), path)
    return path.decode("latin-1"), query


def _origin_form(method: bytes, target: bytes) -> bytes:
    if target == b"*" and method == b"OPTIONS":
        return target
    match = _ABSOLUTE.match(target)
    if match is None:
        raise InvalidRequest("the request target must be a path or an http URL")
    rest = target[match.end() :]
    return rest if rest.startswith(b"/") else b"/" + rest


NO_ALIASES: Mapping[str, str] = {}
Field = tuple[bytes, bytes]  # name in lower case, value without white space around it

# llhttp knows these methods, and no method changes how a message is parsed. In place of any
# other method it gets TRACE, which no route has.
_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE"))
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")
_UPGRADE = re.compile(rb"^upgrade:", re.IGNORECASE | re.MULTILINE)
_IGNORED = b"Upgrade-Ignored:"  # the application sees the field by this name
# RFC 9112 (3.2): a Host field that is not a host with an optional port gets 400. A host is a
# reg-name of RFC 3986 (3.2.2) or an address in brackets.
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+;=%-]*)(:[0-9]*)?")
_TOO_MANY_DIGITS = "Content-Length overflow"  # llhttp's message for a length of 2^64 or more


class RequestHead(NamedTuple):
    """A parsed request head.

    Attributes:
        target: as it was sent; empty if it is not known.
        path: the form that `read_target` returns, or the route of that alias; routes, keys and
            limits use it.
        length: bytes of the body; None if it is chunked.
    """

    method: bytes
    target: bytes
    path: str
    query: bytes
    version: str
    fields: list[Field]
    keep_alive: bool
    length: int | None

    @property
    def expects_continue(self) -> bool:
        expects = map(bytes.lower, self.values(b"expect"))
        return self.version == "1.1" and b"100-continue" in expects

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key == name]


class ParserListener(Protocol):
    """The receiver of parsed heads and bodies; `RequestParser.step` passes its errors on."""

    def on_head(self, head: RequestHead) -> None: ...

    def on_part(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...


class RequestParser:
    """A parser that gets bytes by `feed` and parses one span of them per `step`.

    Args:
        owner: gets the heads and bodies.
        max_head: the most bytes of a request's head, with the empty lines before it, its chunk
            extensions and its trailer fields.
        aliases: the routes that other paths stand for.
    """

    def __init__(
        self, owner: ParserListener, max_head: int, aliases: Mapping[str, str] = NO_ALIASES
    ) -> None:
        self.ended = False  # the connection takes no more requests
        self._owner, self._max_head, self._aliases = owner, max_head, aliases
        self._data = bytearray()  # not parsed yet
        self._head = HeadFraming(max_head)
        self._body: Framing | None = None  # None: in a head, or before one
        self._llhttp = httptools.HttpRequestParser(self)
        # Results of llhttp's callbacks for the current span:
        self._version = ""  # empty: the head did not end
        self._keep_alive = self._complete = False
        self._parts: list[bytes] = []
        # ... and for the current request:
        self._begun = 0  # messages that llhttp has begun
        self._method = self._target = b""
        self._fields: list[Field] = []

    @property
    def in_head(self) -> bool:
        """True inside a request's head, and between two requests."""
        return self._body is None

    @property
    def left(self) -> int:
        """Number of bytes that were not parsed yet."""
        return len(self._data)

    @property
    def begun(self) -> bool:
        """True if part of a head has arrived, or any bytes are unparsed."""
        return self._head.used > 0 or len(self._data) > 0

    @property
    def seen(self) -> RequestHead:
        """The part of the head that is known so far."""
        try:
            path, query = self._read_target()
        except InvalidRequest:
            path, query = "", b""
        return RequestHead(self._method, self._target, path, query, "", self._fields, False, None)

    def feed(self, data: bytes | memoryview) -> None:
        if not self.ended:
            self._data += data

    def stop(self) -> None:
        """Drop all unparsed bytes and all bytes that still arrive."""
        self.ended = True
        self._data.clear()

    def step(self) -> bool:
        """Parse the next span and tell the owner; return False if more bytes are needed.

        Raises:
            HeaderTooLarge, BodyTooLarge, InvalidRequest: the connection cannot be used any more.
        """
        if not self._data:
            return False
        size = (self._body or self._head).span(self._data)
        if not size:
            return False
        span = bytes(memoryview(self._data)[:size])
        del self._data[:size]
        self._version, self._complete = "", False
        self._parse(self._readable(span) if self._body is None else span)
        head = self._judge()
        if head is not None:
            self._owner.on_head(head)
        if self._parts:
            parts, self._parts = self._parts, []
            self._owner.on_part(parts[0] if len(parts) == 1 else b"".join(parts))
        if self._complete:
            self._end()
        return True

    # The callbacks of llhttp.

    def on_message_begin(self) -> None:
        self._begun += 1

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._body is None:  # otherwise it is a trailer field, and those are dropped
            self._fields.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self._version = self._llhttp.get_http_version()
        self._keep_alive = self._llhttp.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._complete = True

    def _readable(self, span: bytes) -> bytes:
        """Return a head's lines with any method or upgrade that would stop llhttp replaced."""
        if not self._method and self._head.begun:
            self._method = span.partition(b" ")[0]
            if not span.partition(b"\r\n")[0].rpartition(b" ")[2].startswith(b"HTTP/"):
                raise _invalid()  # llhttp would also accept RTSP and ICE
            if self._method not in _METHODS:
                span = self._stand_in(self._method) + span[len(self._method) :]
        if b"pgrade" in span.lower():
            span = _UPGRADE.sub(_IGNORED, span)
        return span

    def _stand_in(self, method: bytes) -> bytes:
        if method == b"CONNECT":
            raise InvalidRequest("CONNECT is for proxies")
        if not _METHOD.fullmatch(method):
            raise _invalid()
        return b"TRACE"

    def _parse(self, span: bytes) -> None:
        try:
            self._llhttp.feed_data(span)
        except httptools.HttpParserError as error:
            if error.args == (_TOO_MANY_DIGITS,):
                raise BodyTooLarge("the body is over 2^64 bytes") from None
            raise _invalid() from None
        except httptools.HttpParserUpgrade:
            raise _invalid() from None

    def _judge(self) -> RequestHead | None:
        """Return the head if this span completed it.

        Raises InvalidRequest if llhttp and `framing` disagree about where the head or the request
        ends: bytes of one request could then be taken for another's.
        """
        head, body = None, self._body
        if body is None:
            if self._head.ended != bool(self._version):
                raise _invalid()
            if not self._head.ended:
                return None
            head = self._read_head()
            body = self._body = self._framing_of(head)
        if body.ended != self._complete or self._begun > 1:
            raise _invalid()
        return head

    def _read_head(self) -> RequestHead:
        """Return the head, after the checks that llhttp leaves out."""
        hosts, length, version = 0, 0, self._version
        chunked = False
        for name, value in self._fields:
            if name == b"host":
                hosts += 1
                if not _HOST.fullmatch(value):
                    raise _invalid()
            elif name == b"content-length":
                length = int(value)  # llhttp has checked the digits, and that the field is unique
            elif name == b"transfer-encoding":
                chunked = True
                if value.lower() != b"chunked" or version == "1.0":  # RFC 9112 (6.1)
                    raise _invalid()
        if hosts > 1 or (hosts == 0 and version == "1.1") or version not in ("1.1", "1.0"):
            raise _invalid()
        path, query = self._read_target()
        return RequestHead(
            method=self._method,
            target=self._target,
            path=path,
            query=query,
            version=version,
            fields=self._fields,
            keep_alive=self._keep_alive and version == "1.1",
            length=None if chunked else length,
        )

    def _read_target(self) -> tuple[str, bytes]:
        """Return the route and the query: from here on, an alias is its route."""
        path, query = read_target(self._method, self._target)
        return self._aliases.get(path, path), query

    def _framing_of(self, head: RequestHead) -> Framing:
        self._last = not head.keep_alive
        if head.length is None:
            return ChunkFraming(self._max_head, self._head.used)
        return LengthFraming(head.length)

    def _end(self) -> None:
        """Reset the state after a complete request, and tell the owner."""
        self._head, self._body, self._begun = HeadFraming(self._max_head), None, 0
        self._method, self._target, self._fields = b"", b"", []
        if self._last:
            self.stop()
        self._owner.on_end()


def _invalid() -> InvalidRequest:
    return InvalidRequest("the request is not valid HTTP")
