"""HTTP/1.1 requests out of a stream of bytes: llhttp, and what it leaves to its user.

llhttp refuses what smuggles (both lengths, two lengths, folded lines, bare line feeds, white space
before a colon, broken chunks). Added here are a cap on the bytes of a head, the Host rule, the
versions that are spoken, and answers for what llhttp has no word for: methods of the caller's own,
and upgrades, which RFC 9110 lets a server ignore.
"""

import re
from dataclasses import dataclass
from typing import Protocol

import httptools

from gpuscore.errors import GpuscoreError, HeaderTooLarge, InvalidRequest

Field = tuple[bytes, bytes]  # name in lower case, value without white space around it

# A method at the start of a request's first bytes, and one that llhttp knows and no route has.
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64} ")
_STAND_IN = b"TRACE "


@dataclass(frozen=True, slots=True)
class Head:
    method: bytes
    target: bytes
    version: str
    fields: list[Field]
    keep_alive: bool

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key == name]

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]

    @property
    def length(self) -> int | None:
        """Bytes of the body; None if only its end will tell."""
        if self.values(b"transfer-encoding"):
            return None
        return int(next(iter(self.values(b"content-length")), 0))  # llhttp saw to the digits


class Owner(Protocol):
    """Is told what was parsed; an error that it raises comes out of `RequestParser.feed`."""

    def on_head(self, head: Head) -> None: ...

    def on_part(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...


class _Behind(Exception):
    """Something follows the last request of a connection."""


class RequestParser:
    """
    Args:
        max_head: bytes of a request's head. One that came right behind another request may be up
            to twice as long before it is refused here; who gets the head can count again.
    """

    def __init__(self, owner: Owner, max_head: int) -> None:
        self.in_head = True  # of a request, or before one
        self.ended = False  # nothing may follow the last request
        self._owner, self._max_head = owner, max_head
        self._llhttp = httptools.HttpRequestParser(self)
        self._head_size = self._complete = 0
        self._begun = self._upgrade = self._last = False
        self._method = self._target = b""
        self._fields: list[Field] = []

    @property
    def begun(self) -> bool:
        """Whether some of a request has come in."""
        return self._begun or self._head_size > 0

    @property
    def seen(self) -> Head:
        """As much of the head as is known."""
        method = self._method or self._llhttp.get_method() if self._target else b""
        return Head(method, self._target, "", self._fields, False)

    def feed(self, data: bytes) -> None:
        """
        Raises:
            HeaderTooLarge, InvalidRequest: the connection cannot go on.
        """
        while data and not self.ended:
            if not self.in_head:
                self._parse(data)
                return
            room = self._max_head - self._head_size
            if room <= 0:
                raise HeaderTooLarge(f"the request head is over {self._max_head} bytes")
            piece, data = data[:room], data[room:]
            before = self._complete
            self._parse(piece)
            if self.in_head:
                self._head_size = self._head_size + len(piece) if before == self._complete else 0

    # What llhttp calls.

    def on_message_begin(self) -> None:
        if self.ended:  # HTTP/1.0 with a keep-alive that is not offered
            raise _Behind
        self._begun, self._target, self._fields = True, b"", []

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:  # else it is behind a chunked body, where we want none
            self._fields.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self._upgrade = self._llhttp.should_upgrade()
        if self._upgrade:
            return  # `_parse` goes on
        version = self._llhttp.get_http_version()
        self._check(version)
        method = self._method or self._llhttp.get_method()
        self.in_head, self._head_size = False, 0
        keep_alive = self._llhttp.should_keep_alive() and version == "1.1"
        self._last = not keep_alive
        self._owner.on_head(Head(method, self._target, version, self._fields, keep_alive))

    def on_body(self, body: bytes) -> None:
        self._owner.on_part(body)

    def on_message_complete(self) -> None:
        if self._upgrade:
            return
        self._complete += 1
        self.ended = self._last
        self.in_head, self._begun, self._method = True, False, b""
        self._owner.on_end()

    def _check(self, version: str) -> None:
        """What llhttp lets pass."""
        hosts = 0
        for name, value in self._fields:
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding" and value.lower() != b"chunked":
                raise _invalid()
        if hosts > 1 or (hosts == 0 and version == "1.1") or version not in ("1.1", "1.0"):
            raise _invalid()

    def _parse(self, data: bytes) -> None:
        first, before = not self.begun, self._complete
        try:
            self._llhttp.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserInvalidMethodError:
            method = _METHOD.match(data)
            if method is None or not first or before != self._complete or self._method:
                raise _invalid() from None
            self._method = data[: method.end() - 1]
            self._parse_anew(_STAND_IN + data[method.end() :])
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, _Behind):
                return
            if isinstance(error.__context__, GpuscoreError):
                raise error.__context__ from None
            raise
        except httptools.HttpParserError:
            if not (self.ended and self.in_head):  # else: behind the last request
                raise _invalid() from None

    def _parse_anew(self, data: bytes) -> None:
        self._llhttp = httptools.HttpRequestParser(self)
        self._parse(data)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """llhttp takes no body with an upgrade, so the same head is parsed without it."""
        if self._llhttp.get_method() == b"CONNECT":
            raise InvalidRequest("CONNECT is for proxies")
        lines = [b"%s %s HTTP/1.1" % (self._llhttp.get_method(), self._target)]
        lines += [b"%s: %s" % field for field in self._fields if field[0] != b"upgrade"]
        self._begun = False
        self._parse_anew(b"\r\n".join([*lines, b"", rest]))


def _invalid() -> InvalidRequest:
    return InvalidRequest("the request is not valid HTTP")
