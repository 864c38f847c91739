"""The check of keys before a route is served."""

from collections.abc import Collection

from starlette.routing import BaseRoute, Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gpuscore.errors import InvalidApiKey
from gpuscore.server.api.answers import error_response
from gpuscore.server.http.auth import NO_KEY, ApiKeys


class AuthMiddleware:
    """The middleware that passes a request on if its route is open or its key is valid.

    It decides by the route object that the router will use, never by a path that a Host header
    could have changed. A request that matches no route needs a key.
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
        state = scope.setdefault("state", {})
        # For a scoring request, the connection has checked the key before it read the body.
        tenant = state.get("tenant") or self.keys.tenant(scope["headers"])
        if tenant is None and not self._is_open(scope):
            error = InvalidApiKey("a valid API key is required: Authorization: Bearer KEY")
            await error_response(error)(scope, receive, send)
            return
        state["tenant"] = tenant or NO_KEY
        await self.app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        for route in self.router.routes:
            if route.matches(scope)[0] == Match.FULL:
                return id(route) in self.open_routes
        return False
