"""Clients of a gpuscore server: `Client` and `AsyncClient`, over httpx (the extra `client`)."""

from gpuscore.client.clients import AsyncClient, Client
from gpuscore.client.errors import BadAnswer, ClientError, ConnectionFailed, StatusError
from gpuscore.client.results import (
    ClassifyResponse,
    Completion,
    CompletionsResponse,
    Model,
    PairsResponse,
    RerankResponse,
    ScoreResponse,
)

__all__ = [
    "AsyncClient",
    "BadAnswer",
    "ClassifyResponse",
    "Client",
    "ClientError",
    "Completion",
    "CompletionsResponse",
    "ConnectionFailed",
    "Model",
    "PairsResponse",
    "RerankResponse",
    "ScoreResponse",
    "StatusError",
]
