"""Routes without a body: probes, the model and metrics."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from gpuscore.errors import InvalidRequest, Unavailable
from gpuscore.server.api.answers import json_response
from gpuscore.server.api.info import server_info
from gpuscore.server.api.paths import TOKENIZER_INFO_PATH
from gpuscore.server.observe.operations import Operations
from gpuscore.server.service import LOADING_RETRY_AFTER, ScoringService


def add_pages(app: FastAPI, service: ScoringService) -> None:
    @app.get(
        "/livez",
        summary="Liveness of the server",
        description="200 while the process and its event loop are alive, whatever the engine does.",
    )
    async def livez() -> Response:
        return json_response({"status": "ok"})

    @app.get(
        "/health",
        summary="Health of the engine",
        description="200 while the engine is alive or still loading.",
    )
    async def health() -> Response:
        if not service.healthy:
            raise Unavailable("the engine is not running", retry_after=LOADING_RETRY_AFTER)
        return json_response({"status": "ok"})

    @app.get(
        "/ready", summary="Readiness", description="200 once the model is loaded and warmed up."
    )
    async def ready() -> Response:
        if not service.ready:
            raise Unavailable("not ready to score", retry_after=LOADING_RETRY_AFTER)
        return json_response({"status": "ready"})

    @app.get(
        "/v1/models",
        summary="Served model",
        description="The model's name and its longest prompt, as in OpenAI's API.",
    )
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model_card(service)]})

    @app.get(
        "/info",
        summary="Model and limits",
        description="Limits, prompt and formula of the served model, as in TEI's API.",
    )
    async def info() -> Response:
        return json_response(server_info(service.names, service.loaded()))

    @app.get(
        TOKENIZER_INFO_PATH,
        summary="Tokenizer",
        description="The tokenizer's special tokens and chat template, as in vLLM's API.",
    )
    async def tokenizer_info() -> Response:
        info = service.loaded().tokenizer_info
        if info is None:
            raise InvalidRequest("this model has no tokenizer")
        return json_response(info)


def add_metrics(app: FastAPI, operations: Operations) -> None:
    @app.get(
        "/metrics",
        summary="Metrics",
        description="Metrics in Prometheus' text format, or in OpenMetrics on request.",
    )
    def metrics(request: Request) -> Response:  # in a thread: the engine's statistics may be slow
        content, kind = operations.metrics.exposition(request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": kind})


def _model_card(service: ScoringService) -> dict[str, Any]:
    card = {"id": service.names[0], "object": "model", "created": 0, "owned_by": "gpuscore"}
    if service.model is None:
        return card
    return card | {"max_model_len": service.model.engine.limits.max_model_len}
