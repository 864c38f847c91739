"""The smallest application with this server's routes and statuses, for tests of uvicorn's HTTP."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]


async def app(
    scope: Message,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    status = _status(scope, await _body(receive) if scope["method"] == "POST" else b"")
    length = (b"content-length", b"2")
    await send({"type": "http.response.start", "status": status, "headers": [length]})
    await send({"type": "http.response.body", "body": b"{}"})


async def _body(receive: Callable[[], Awaitable[Message]]) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return body
        body, more = body + message["body"], message["more_body"]
    return body


def _status(scope: Message, body: bytes) -> int:
    pages = dict.fromkeys(("/", "/health", "/v1/models"), ("GET", "HEAD"))
    methods = pages | {"/v1/score": ("POST",)}
    if scope["path"] not in methods:
        return 404
    if scope["method"] not in methods[scope["path"]]:
        return 405
    if scope["path"] != "/v1/score":
        return 200
    if (b"content-type", b"application/json") not in scope["headers"]:
        return 415
    try:
        return 200 if isinstance(json.loads(body), dict) else 400
    except ValueError:
        return 400
