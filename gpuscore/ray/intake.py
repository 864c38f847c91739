"""The prefix of an application of Ray Serve, whose proxy gives it with every path."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Intake:
    """The ASGI layer outside the gate: takes the application's prefix off the path, and leaves the
    request's id to the proxy, which marks every answer with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope, send = _below_prefix(scope), _without_id(send)
        await self._app(scope, receive, send)


def _below_prefix(scope: Scope) -> Scope:
    """Return a copy of the scope, with its path below the application's prefix."""
    prefix = scope.get("root_path", "")
    path = scope["path"].removeprefix(prefix) or "/"
    raw = scope.get("raw_path") or path.encode()
    return {
        **scope,
        "path": path,
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
