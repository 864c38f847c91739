"""Cross-origin requests (CORS): the origins whose web pages may read this server's answers.

There are none by default. The middleware answers preflights, which carry no key, and adds the
header fields to the application's answers. A connection adds them to the answers that it writes by
itself; otherwise a browser would hide a 429 from the page that asked.
"""

import re

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from gpuscore.config import ServerConfig
from gpuscore.errors import ConfigError
from gpuscore.server.http.headers import TIMEOUT_HEADER
from gpuscore.types.record import Headers

ANY = "*"
METHODS = ("GET", "HEAD", "POST")
REQUEST_FIELDS = ("Authorization", "X-Api-Key", "Content-Type", "X-Request-Id", TIMEOUT_HEADER)
ANSWER_FIELDS = ("X-Request-Id", "Retry-After", "Server-Timing")  # fields that a page may read
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]_-]+")


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
    """Return the configured origins; raise ConfigError for one that no browser would ever send."""
    given = [] if config.cors_origin is None else config.cors_origin.split(",")
    allowed = tuple(origin.strip() for origin in given)
    for origin in allowed:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origin {config.cors_origin}: an origin is scheme://host or "
                "scheme://host:port in lower case, without a path, or *"
            )
    return Origins(allowed)
