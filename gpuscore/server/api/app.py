"""The ASGI application: the routes behind the gate, and the work of those that have a dialect."""

from collections.abc import Callable
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import request_response

from gpuscore import __version__
from gpuscore.config import ServerConfig
from gpuscore.dialects.paths import OPEN_PATHS
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.server.api.bodies import Endpoint, endpoint
from gpuscore.server.api.openapi import complete
from gpuscore.server.api.pages import add_files, add_metrics, add_pages, add_probes
from gpuscore.server.http.aliases import read_aliases
from gpuscore.server.http.gate import Gate
from gpuscore.server.http.headers import ApiKeys
from gpuscore.server.observe.operations import Operations
from gpuscore.server.service import ScoringService


def create_app(
    service: ScoringService,
    config: ServerConfig,
    keys: ApiKeys,
    operations: Operations | None = None,
    hosts: frozenset[str] | None = None,
    pieces: Callable[[int], int] = int,
) -> Gate:
    """Return the ASGI application for the served models; by default with metrics but no log."""
    operations = operations or Operations(service)
    aliases = read_aliases(config)
    app = FastAPI(
        title="gpuscore",
        version=__version__,
        description="Label probabilities for many items, without decoding.",
        docs_url=None,  # FastAPI's page loads scripts from another host; see pages.py
        redoc_url=None,
    )
    app.router.route_class = PlainRoute
    for path, dialect in DIALECT_OF.items():
        app.router.add_api_route(
            path,
            endpoint(dialect, service, config),
            methods=["POST"],
            summary=dialect.summary,
            description=dialect.description,
        )
    add_probes(app, service)
    add_pages(app, service, aliases)
    add_metrics(app, operations)
    longest = int(config.request_timeout * 1000)
    plain = app.openapi
    described = cache(lambda: complete(plain(), bool(keys), longest, aliases))
    app.openapi = described  # type: ignore[method-assign]
    open_paths = {*OPEN_PATHS, *add_files(app, config.ui)}
    return Gate(app, config, keys, operations, hosts=hosts, open_paths=open_paths, pieces=pieces)


class PlainRoute(APIRoute):
    """A route whose endpoint takes the request and returns the response.

    It appears in /openapi.json like any other, but skips FastAPI's dependency handling, which costs
    more than parsing a small request.
    """

    def __init__(self, path: str, endpoint: Endpoint, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.app = request_response(endpoint)
