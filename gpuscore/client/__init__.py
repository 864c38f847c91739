"""Clients of a gpuscore server: `Client` and `AsyncClient`, over httpx (the extra `client`)."""

from gpuscore.client.asynchronous import AsyncClient
from gpuscore.client.errors import BadAnswer, ClientError, ConnectionFailed, StatusError
from gpuscore.client.results import Model, RerankResponse, ScoreResponse, Usage
from gpuscore.client.synchronous import Client

__all__ = [
    "AsyncClient",
    "BadAnswer",
    "Client",
    "ClientError",
    "ConnectionFailed",
    "Model",
    "RerankResponse",
    "ScoreResponse",
    "StatusError",
    "Usage",
]
