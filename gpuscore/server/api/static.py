"""Pages for people and the files that they load, all from `server/static`: the playground, the
status page, and Swagger UI for /docs.

A page holds nothing of the server's: its scripts ask the routes, with the reader's key.
"""

from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpuscore.dialects.paths import DOCS_PATH, PLAYGROUND_PATH, STATUS_PATH

ROOT = Path(__file__).parents[1] / "static"
PIECE = 2**16  # bytes; a connection waits for its client while about as many are on their way
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# Scripts and styles only from this server and only from files, so that no text that a page shows
# can run; requests only to this server; no page of another site may hold this one in a frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
UI = {PLAYGROUND_PATH: "ui/index.html", STATUS_PATH: "ui/status.html"}
DOCS = {DOCS_PATH: "docs/index.html"}


def add_ui(app: FastAPI) -> list[str]:
    """Add the playground and the status page; return the paths of their files."""
    return _add(app, UI, "ui")


def add_docs(app: FastAPI) -> list[str]:
    """Add Swagger UI at /docs; return the paths of its files."""
    return _add(app, DOCS, "docs")


def _add(app: FastAPI, pages: dict[str, str], folder: str) -> list[str]:
    shown = set(pages.values())
    names = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).iterdir())
    files = pages | {f"/{name}": name for name in names if name not in shown}
    for path, name in files.items():
        app.add_api_route(path, _endpoint(name), methods=["GET"], include_in_schema=False)
    return list(files)


def _endpoint(name: str) -> Callable[[Request], Awaitable[Response]]:
    kind = TYPES[Path(name).suffix]

    async def file(request: Request) -> Response:
        return _InPieces(_read(name), headers=HEADERS, media_type=kind)

    return file


class _InPieces(Response):
    """A response whose body is sent as the client takes it.

    The files need no key and are large. Sent at once, each client that does not read its answer
    would hold a copy.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        for start in range(0, max(1, len(self.body)), PIECE):
            piece, more = self.body[start : start + PIECE], start + PIECE < len(self.body)
            await send({"type": "http.response.body", "body": piece, "more_body": more})


@cache
def _read(name: str) -> bytes:
    """Return a file's bytes, which are kept from the first request on."""
    return (ROOT / name).read_bytes()
