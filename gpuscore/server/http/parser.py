"""HTTP/1.1 requests out of a stream of bytes: llhttp, and what it leaves to its user.

llhttp refuses what smuggles (both lengths, two lengths, folded lines, bare line feeds, white space
before a colon, broken chunks). Added here are bounds on what it parses at a time (`framing`) and on
the bytes of a head, the Host rule, the versions that are spoken, and what llhttp would stop at:
methods of the caller's own, and upgrades, which RFC 9110 (7.8) lets a server ignore. It gets those
under a neutral name; every byte is parsed once.
"""

import re
from typing import NamedTuple, Protocol

import httptools

from gpuscore.errors import BodyTooLarge, InvalidRequest
from gpuscore.server.http.framing import ChunkFraming, Framing, HeadFraming, LengthFraming
from gpuscore.server.http.target import read_target

Field = tuple[bytes, bytes]  # name in lower case, value without white space around it

# Known to llhttp and without a meaning of their own for how a message is read. It gets one of them,
# which no route has, in the place of any other.
_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE"))
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")
_UPGRADE = re.compile(rb"^upgrade:", re.IGNORECASE | re.MULTILINE)
_IGNORED = b"Upgrade-Ignored:"  # the application sees the field by this name
# RFC 9112 (3.2): a Host field that is no host, with a port or without, gets 400. What may stand in
# a host is RFC 3986's reg-name (3.2.2) or an address in brackets.
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+;=%-]*)(:[0-9]*)?")
_TOO_MANY_DIGITS = "Content-Length overflow"  # llhttp's words for a length of 2^64 or more


class RequestHead(NamedTuple):
    """
    Attributes:
        target: as it was sent; empty if that is not known.
        path: as `read_target` has it: the one form that routes, keys and limits go by.
        length: bytes of the body; None if only its end will tell.
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
    """Is told what was parsed; an error that it raises comes out of `RequestParser.step`."""

    def on_head(self, head: RequestHead) -> None: ...

    def on_part(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...


class RequestParser:
    """Takes bytes in by `feed`; parses them by `step`, one span at a time.

    Args:
        max_head: bytes of a request's head, with the empty lines before it, the extensions of its
            chunks and the fields behind its body.
    """

    def __init__(self, owner: ParserListener, max_head: int) -> None:
        self.ended = False  # nothing may follow the last request
        self._owner, self._max_head = owner, max_head
        self._data = bytearray()  # not parsed yet
        self._head = HeadFraming(max_head)
        self._body: Framing | None = None  # None: in a head, or before one
        self._llhttp = httptools.HttpRequestParser(self)
        # What llhttp has called for: in this span ...
        self._version = ""  # empty: the head did not end
        self._keep_alive = self._complete = False
        self._parts: list[bytes] = []
        self._begun = 0  # ... and in this request: beginnings, method, target, fields
        self._method = self._target = b""
        self._fields: list[Field] = []

    @property
    def in_head(self) -> bool:
        """Of a request, or before one."""
        return self._body is None

    @property
    def left(self) -> int:
        """Bytes that are not parsed."""
        return len(self._data)

    @property
    def begun(self) -> bool:
        """Whether some of a request has come in that did not end."""
        return self._head.used > 0 or len(self._data) > 0

    @property
    def seen(self) -> RequestHead:
        """As much of the head as is known."""
        try:
            path, query = read_target(self._method, self._target)
        except InvalidRequest:
            path, query = "", b""
        return RequestHead(self._method, self._target, path, query, "", self._fields, False, None)

    def feed(self, data: bytes | memoryview) -> None:
        if not self.ended:
            self._data += data

    def stop(self) -> None:
        """Nothing more is wanted of this connection."""
        self.ended = True
        self._data.clear()

    def step(self) -> bool:
        """Parse the next span and tell the owner; False if that takes more bytes.

        Raises:
            HeaderTooLarge, BodyTooLarge, InvalidRequest: the connection cannot go on.
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

    # What llhttp calls.

    def on_message_begin(self) -> None:
        self._begun += 1

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._body is None:  # else it is behind a chunked body, where we want none
            self._fields.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self._version = self._llhttp.get_http_version()
        self._keep_alive = self._llhttp.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._complete = True

    def _readable(self, span: bytes) -> bytes:
        """Lines of a head as llhttp goes on after them."""
        if not self._method and self._head.begun:
            self._method = span.partition(b" ")[0]
            if not span.partition(b"\r\n")[0].rpartition(b" ")[2].startswith(b"HTTP/"):
                raise _invalid()  # llhttp reads RTSP and ICE as well
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
        """The head, if it ended. Where llhttp found another end than `framing`, one of the two is
        wrong, and bytes of one request could be taken for another's."""
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
        """What llhttp lets pass is checked here."""
        hosts, length, version = 0, 0, self._version
        chunked = False
        for name, value in self._fields:
            if name == b"host":
                hosts += 1
                if not _HOST.fullmatch(value):
                    raise _invalid()
            elif name == b"content-length":
                length = int(value)  # llhttp saw to the digits, and that there is one
            elif name == b"transfer-encoding":
                chunked = True
                if value.lower() != b"chunked" or version == "1.0":  # RFC 9112 (6.1)
                    raise _invalid()
        if hosts > 1 or (hosts == 0 and version == "1.1") or version not in ("1.1", "1.0"):
            raise _invalid()
        path, query = read_target(self._method, self._target)
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

    def _framing_of(self, head: RequestHead) -> Framing:
        self._last = not head.keep_alive
        if head.length is None:
            return ChunkFraming(self._max_head, self._head.used)
        return LengthFraming(head.length)

    def _end(self) -> None:
        """The request is complete."""
        self._head, self._body, self._begun = HeadFraming(self._max_head), None, 0
        self._method, self._target, self._fields = b"", b"", []
        if self._last:
            self.stop()
        self._owner.on_end()


def _invalid() -> InvalidRequest:
    return InvalidRequest("the request is not valid HTTP")
