"""The document of /openapi.json, with references resolved."""

import asyncio
import json
from typing import Any

import httpx

from gpuscore.config import ServerConfig
from gpuscore.dialects.served import ServedModel
from gpuscore.server.api.app import create_app
from gpuscore.server.http.headers import ApiKeys
from gpuscore.server.service import ScoringService


def openapi() -> dict[str, Any]:
    config = ServerConfig()
    service = ScoringService([ServedModel("demo")])
    try:
        document = asyncio.run(_fetched(create_app(service, config, ApiKeys(()))))
    finally:
        service.close()
    resolved: dict[str, Any] = _resolved(document, document)
    return resolved


async def _fetched(app: Any) -> dict[str, Any]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/openapi.json")
    document: dict[str, Any] = json.loads(answer.raise_for_status().text)
    return document


def _resolved(part: Any, document: dict[str, Any]) -> Any:
    """Return a part with all references replaced by their targets; none contains itself."""
    if isinstance(part, list):
        return [_resolved(element, document) for element in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        node: Any = document
        for name in part["$ref"].removeprefix("#/").split("/"):
            node = node[name]
        return _resolved(node, document)
    return {key: _resolved(value, document) for key, value in part.items()}
