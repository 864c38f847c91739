"""The document that a server gives at /openapi.json."""

import asyncio
import json
from typing import Any

import httpx

from gpuscore.config import ServerConfig
from gpuscore.server.app import create_app
from gpuscore.server.auth import ApiKeys
from gpuscore.server.service import ScoringService


def openapi() -> dict[str, Any]:
    config = ServerConfig()
    service = ScoringService(("demo",), config.max_inflight_per_key)
    try:
        return asyncio.run(_fetched(create_app(service, config, ApiKeys(()))))
    finally:
        service.close()


async def _fetched(app: Any) -> dict[str, Any]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/openapi.json")
    document: dict[str, Any] = json.loads(answer.raise_for_status().text)
    return document
