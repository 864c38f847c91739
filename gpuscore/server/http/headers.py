"""Checks of a request's head: its size, id, timeout, the server's name, and the page that asks.

A web page can make its own name point to the reader's machine (DNS rebinding). The browser then
lets it read a server on loopback, which without keys trusts everybody there. But the request names
the page's host, so such a server answers only to names that always mean loopback.

Pages of other origins may read no answer by default (CORS). The middleware answers preflights,
which carry no key, and adds the header fields to the application's answers. A connection adds them
to the answers that it writes by itself; otherwise a browser would hide a 429 from the page that
asked.
"""

import ipaddress
import re
from collections.abc import Iterator

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Scope

from gpuscore.config import ServerConfig
from gpuscore.errors import ConfigError, GpuscoreError, HeaderTooLarge, InvalidRequest
from gpuscore.types.record import Headers, record_of

TIMEOUT_HEADER = "X-Request-Timeout-Ms"
ANY = "*"  # host name, or origin
LOOPBACK = "127.0.0.1"
METHODS = ("GET", "HEAD", "POST")
REQUEST_FIELDS = ("Authorization", "X-Api-Key", "Content-Type", "X-Request-Id", TIMEOUT_HEADER)
ANSWER_FIELDS = ("X-Request-Id", "Retry-After", "Server-Timing")  # fields that a page may read
_DIGITS = re.compile(r"[0-9]{1,9}")
_NAME = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")
_AUTHORITY = re.compile(rb"[^/]*://([^/]*)")
_PORT = re.compile(r":[0-9]*\Z")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]_-]+")


def head_refusal(
    headers: list[tuple[bytes, bytes]], target: int, config: ServerConfig
) -> GpuscoreError | None:
    """Return the error of a head that is refused on every route, or None.

    `target` is the length of the request target in bytes.
    """
    size = target + sum(len(name) + len(value) + 4 for name, value in headers)
    if len(headers) > config.max_headers or size > config.max_header_bytes:
        return HeaderTooLarge(
            f"the request head has {len(headers)} fields and {size} bytes, the limits are "
            f"{config.max_headers} and {config.max_header_bytes}"
        )
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        # If a proxy reads by one length and we by the other, a body can smuggle in a request.
        return InvalidRequest("Content-Length and Transfer-Encoding exclude each other")
    return None


def check_request_id(scope: Scope) -> None:
    """Raise InvalidRequest for an id that logs could not show exactly as it was sent."""
    if record_of(scope).bad_request_id:
        raise InvalidRequest(
            "X-Request-Id must be given once, as 1 to 128 of A-Z a-z 0-9 . _ -",
            param="X-Request-Id",
        )


def request_seconds(request: Request, longest: float) -> float:
    """Return the seconds in which the request must be answered; `longest` without a header.

    Raises InvalidRequest unless the header is an integer of milliseconds from 1 to `longest`.
    """
    values = request.headers.getlist(TIMEOUT_HEADER)
    if not values:
        return longest
    most = int(longest * 1000)
    milliseconds = int(values[0]) if len(values) == 1 and _DIGITS.fullmatch(values[0]) else 0
    if not 1 <= milliseconds <= most:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER} must be given once, as an integer from 1 to {most}",
            param=TIMEOUT_HEADER,
        )
    return milliseconds / 1000


class Hosts:
    """The names that a server answers to: loopback names and `names`; all if `names` is None."""

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self._names = names

    def check(self, target: bytes, headers: Headers) -> None:
        """Raise InvalidRequest if a head calls the server by another name.

        A head without a name passes: browsers always send one.
        """
        names = self._names
        if names is None or all(_known(name, names) for name in _names_of(target, headers)):
            return
        raise InvalidRequest(
            "this server answers to loopback names (localhost, 127.0.0.1, [::1]) and names of "
            "--allowed-hosts, not to the name of this request",
            param="Host",
        )


ANY_HOST = Hosts()


def read_hosts(config: ServerConfig, host: str, keys: int) -> Hosts:
    """Return the names for a server that binds `host` and has so many keys.

    Raises:
        ConfigError: `--allowed-hosts` has a value that no Host field can have.
    """
    if config.allowed_hosts is None:
        return ANY_HOST if keys or not is_loopback(host) else Hosts(frozenset())
    allowed = [name.strip().lower().removesuffix(".") for name in config.allowed_hosts.split(",")]
    if allowed == [ANY]:
        return ANY_HOST
    if not all(map(_NAME.fullmatch, allowed)):
        raise ConfigError(
            f"--allowed-hosts {config.allowed_hosts}: a name is a host without a port, such as "
            "scores.example.org or [fd00::1]; * alone allows any"
        )
    bound = f"[{host}]" if ":" in host else host
    return Hosts(frozenset((*allowed, bound)))


def is_loopback(host: str) -> bool:
    """Return True for "localhost" and addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _known(host: str, names: frozenset[str]) -> bool:
    name = _PORT.sub("", host.lower()).removesuffix(".")
    if not name or name in names or name.endswith(".localhost"):
        return True
    return is_loopback(name.strip("[]"))


def _names_of(target: bytes, headers: Headers) -> Iterator[str]:
    if not target.startswith(b"/") and (match := _AUTHORITY.match(target)):
        yield match[1].decode("latin-1")
    for name, value in headers:
        if name == b"host":
            yield value.decode("latin-1")


class Origins:
    """The allowed origins."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = allowed
        exposed = ", ".join(ANSWER_FIELDS).encode()
        self._exposed = (b"access-control-expose-headers", exposed)
        self._names = frozenset(origin.encode() for origin in allowed)

    def around(self, app: ASGIApp) -> ASGIApp:
        if not self._allowed:
            return app
        return CORSMiddleware(
            app,
            allow_origins=self._allowed,
            allow_methods=METHODS,
            allow_headers=REQUEST_FIELDS,
            expose_headers=ANSWER_FIELDS,
        )

    def fields(self, request: Headers) -> list[tuple[bytes, bytes]]:
        """Return the fields that the middleware would add to the answer to this head."""
        origin = next((value for name, value in request if name == b"origin"), None)
        if not self._allowed or origin is None:
            return []
        if ANY.encode() in self._names:
            return [(b"access-control-allow-origin", b"*"), self._exposed]
        if origin not in self._names:
            return [self._exposed]
        vary = (b"vary", b"Origin")
        return [(b"access-control-allow-origin", origin), self._exposed, vary]


def read_origins(config: ServerConfig) -> Origins:
    """Return the configured origins; raise ConfigError for an origin that no browser sends."""
    listed = [] if config.cors_origin is None else config.cors_origin.split(",")
    allowed = tuple(origin.strip() for origin in listed)
    for origin in allowed:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origin {config.cors_origin}: an origin is scheme://host or "
                "scheme://host:port in lower case, without a path, or *"
            )
    return Origins(allowed)
