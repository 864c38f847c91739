"""API keys: which are valid, and the middleware that asks for one on every route by default."""

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Collection
from pathlib import Path

from starlette.routing import BaseRoute, Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gpuscore.config import API_KEY_VARIABLE, ServerConfig
from gpuscore.errors import ConfigError, InvalidApiKey
from gpuscore.server.answers import error_response

NO_KEY = "no-key"  # tenant of every caller where no key is set


class ApiKeys:
    """Digests of the valid keys; without any, every caller is let in."""

    def __init__(self, keys: Collection[bytes]) -> None:
        self._digests = [hashlib.sha256(key).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, authorization: list[bytes]) -> str | None:
        """A name for the key's owner, or None if the header(s) hold no valid key.

        Compares digests in constant time, all of them whatever the outcome.
        """
        if not self._digests:
            return NO_KEY
        scheme, _, key = authorization[0].partition(b" ") if len(authorization) == 1 else (b"",) * 3
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            return None
        return digest.hex()[:16]


def read_api_keys(config: ServerConfig) -> ApiKeys:
    """Keys of the environment and the key file; raises ConfigError for an open door.

    A key is never taken from the command line, where every user of the machine could read it.
    """
    keys = [os.environ.get(API_KEY_VARIABLE, "").strip()]
    if config.api_key_file is not None:
        try:
            keys += Path(config.api_key_file).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {config.api_key_file}: {error}") from error
    found = ApiKeys([key.strip().encode() for key in keys if key.strip()])
    if config.api_key_file is not None and not found:
        raise ConfigError(f"--api-key-file {config.api_key_file} holds no key")
    if not found and not config.insecure and not _is_loopback(config.host):
        raise ConfigError(
            f"--host {config.host} is reachable from other machines and no API key is set: set "
            f"{API_KEY_VARIABLE} or --api-key-file, or pass --insecure"
        )
    return found


class AuthMiddleware:
    """Lets a request through if its route is open or its key is valid.

    The decision is made on the route object that the router will use, never on a path that a
    Host header could have changed; what matches no route is not open.
    """

    def __init__(
        self, app: ASGIApp, router: Router, open_routes: Collection[BaseRoute], keys: ApiKeys
    ) -> None:
        self.app, self.router, self.keys = app, router, keys
        self.open_routes = {id(route) for route in open_routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        tenant = self.keys.tenant(given)
        if tenant is None and not self._is_open(scope):
            error = InvalidApiKey("a valid API key is required: Authorization: Bearer KEY")
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant or NO_KEY
        await self.app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        for route in self.router.routes:
            if route.matches(scope)[0] == Match.FULL:
                return id(route) in self.open_routes
        return False


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
