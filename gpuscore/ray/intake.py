"""The limits that `gpuscore serve` applies at its connections, for requests from Ray's proxy."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuscore.config import ServerConfig
from gpuscore.errors import GpuscoreError, Overloaded, RequestTimeout
from gpuscore.server.http.aliases import read_aliases
from gpuscore.server.http.auth import ApiKeys
from gpuscore.server.http.exchange import MORE


class Intake:
    """The outermost ASGI layer: counts requests with a body, and refuses requests over a limit.

    A refusal is raised where the application reads the body, so that it is answered, logged and
    counted as any other error. The proxy gives an application its prefix with the path, which is
    taken off here, and marks every answer with the request's id, as the application does.

    Args:
        app: the application.
        config: the limits, here of this process.
        most: requests in flight (`--max-queued-requests`).
        keys: the valid keys.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, most: int, keys: ApiKeys) -> None:
        self._app, self._config, self._most, self._keys = app, config, most, keys
        self._aliases = read_aliases(config)
        self._tenants: Counter[str] = Counter()  # requests in flight
        self._bytes = 0  # of their bodies and answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope, send = _below_prefix(scope, self._aliases), _without_id(send)
        tenant = self._keys.tenant(scope["headers"])
        if scope["method"] != "POST" or tenant is None:  # it is refused with its head alone
            await self._app(scope, receive, send)
            return
        body = _Body(self, receive, self._refusal(tenant), self._config.body_timeout)
        scope["state"][MORE] = body.more
        self._tenants[tenant] += 1
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]
            self._bytes -= body.size

    def add(self, size: int, own: int) -> GpuscoreError | None:
        """Count bytes of a request that has `own`; return an error if there are too many."""
        others = self._bytes - own
        self._bytes += size
        limit = self._config.max_queued_bytes
        if not others or others + own + size <= limit:
            return None
        return Overloaded(
            f"bodies and answers of {others} bytes are in flight, the limit is {limit} bytes",
            retry_after=1,
        )

    def _refusal(self, tenant: str) -> GpuscoreError | None:
        requests = self._tenants.total()
        if requests >= self._most:
            return Overloaded(f"{requests} requests are in flight", retry_after=1)
        if self._tenants[tenant] >= self._config.max_inflight_per_key:
            own = self._tenants[tenant]
            return Overloaded(f"{own} requests of this API key are in flight", retry_after=1)
        return None


class _Body:
    """The body of one request, counted and within its time."""

    def __init__(
        self, intake: Intake, receive: Receive, refusal: GpuscoreError | None, seconds: float
    ) -> None:
        self.size = 0
        self._intake, self._receive, self._refusal = intake, receive, refusal
        self._seconds, self._end = seconds, monotonic() + seconds
        self._complete = False

    async def receive(self) -> Message:
        if self._refusal is not None:
            raise self._refusal
        if self._complete:  # what comes now is the client's leaving, however late
            return await self._receive()
        try:
            async with asyncio.timeout(self._end - monotonic()):
                message = await self._receive()
        except TimeoutError:
            late = f"the body was not complete after {self._seconds:g} seconds"
            raise RequestTimeout(late) from None
        self._complete = not message.get("more_body", False)
        refusal = self.more(len(message.get("body", b"")))
        if refusal is not None:
            raise refusal
        return message

    def more(self, size: int) -> GpuscoreError | None:
        """Count bytes, also of the unpacked body and of the answer."""
        refusal = self._intake.add(size, self.size)
        self.size += size
        return refusal


def _below_prefix(scope: Scope, aliases: Mapping[str, str]) -> Scope:
    """Return a copy of the scope, with the route of its path below the application's prefix."""
    prefix = scope.get("root_path", "")
    path = scope["path"].removeprefix(prefix) or "/"
    raw = scope.get("raw_path") or path.encode()
    return {
        **scope,
        "path": aliases.get(path, path),
        "raw_path": raw.removeprefix(prefix.encode()) or b"/",
        "root_path": "",
        "state": dict(scope.get("state") or {}),
    }


def _without_id(send: Send) -> Send:
    async def without(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
            message = {**message, "headers": kept}
        await send(message)

    return without
