"""Routes without a body: probes, the models, metrics; and pages for people with the files that they
load, all from `server/static`: the playground, the status page, and Swagger UI for /docs.

A page holds no data of the server: its scripts ask the routes, with the reader's key.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from gpuscore import __version__
from gpuscore.config.served import listed
from gpuscore.dialects.paths import (
    DOCS_PATH,
    MODELS_PATH,
    PLAYGROUND_PATH,
    STATUS_PATH,
    TOKENIZER_INFO_PATH,
)
from gpuscore.dialects.served import (
    LOADING,
    LOADING_RETRY_AFTER,
    LOST,
    LoadedModel,
    ModelTable,
    ServedModel,
)
from gpuscore.errors import InvalidRequest, Unavailable
from gpuscore.server.api.bodies import PIECE_SENT, InPieces, json_response
from gpuscore.server.observe.operations import Operations
from gpuscore.server.service import ScoringService
from gpuscore.system.machine import commit, local_machine, versions


def server_info(name: str, model: LoadedModel, aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of text-embeddings-inference, and our own fields under `gpuscore`."""
    limits = model.engine.limits
    requests = model.prompts.builder.limits
    return {
        "model_id": name,
        "model_sha": None,
        "model_dtype": model.about,
        "model_type": _model_type(model),
        "max_concurrent_requests": model.backlog.most_requests,
        "max_input_length": limits.max_model_len,
        "max_batch_tokens": limits.max_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": requests.max_items,
        "auto_truncate": requests.rerank_truncate,
        "tokenization_workers": None,
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "gpuscore": {
            "family": _family(model),
            "classes": limits.classes,
            "classes_activation": None if (head := model.prompts.head) is None else head.activation,
            "gated_product": limits.gated_product or None,
            "states": limits.num_states or None,
            "max_request_tokens": requests.max_request_tokens,
            "valid_token_ids": limits.vocab_rows,
            "path_aliases": dict(aliases),
            "machine": local_machine(),
            "versions": versions(),
            "commit": commit(),
            "settings": dict(model.settings),
        },
    }


def _model_type(model: LoadedModel) -> dict[str, Any]:
    """Return TEI's kind of model, or `language_model`, which is ours, for any other model."""
    classes = model.engine.limits.classes
    if model.prompts.family is not None:
        if model.prompts.family.family.ranks:
            return {"reranker": _labels(["relevance"])}
        classes = model.prompts.family.family.classes
    return {"language_model": {}} if classes is None else {"classifier": _labels(classes)}


def _labels(names: Sequence[str]) -> dict[str, Any]:
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def _family(model: LoadedModel) -> dict[str, Any] | None:
    if model.prompts.family is None:
        return None
    family = model.prompts.family.family
    return {
        "name": family.name,
        "source": family.source,
        "prompt": list(family.parts),
        "shares_query": family.shares_query,
        "labels": list(family.labels),
        "label_token_ids": model.prompts.family.label_ids,
        "classes": list(family.classes),
        "instruction": family.instruction,
        "activation": family.activation if family.ranks else "softmax",
        "scale": family.scale,
    }


MODEL = "model"
WHICH_MODEL = {
    "parameters": [
        {
            "name": MODEL,
            "in": "query",
            "required": False,
            "schema": {"type": "string"},
            "description": "The name of one of several served models, as in GET /v1/models.",
        }
    ]
}


def add_probes(app: FastAPI, service: ScoringService) -> None:
    @app.get(
        "/livez",
        summary="Liveness of the server",
        description="200 while the process and its event loop are alive, whatever the engine does.",
    )
    async def livez(request: Request) -> Response:
        return json_response({"status": "ok"})

    @app.get(
        "/health",
        summary="Health of the engines",
        description="200 while an engine is alive or a model is still loading. With several models "
        "the answer gives the state of each; `?model=` selects one.",
        openapi_extra=WHICH_MODEL,
    )
    async def health(request: Request) -> Response:
        named = _named(request, service.models)
        if not service.healthy or (named is not None and named.state == LOST):
            raise _unavailable("the engine is not running", service.models, LOST)
        return json_response({"status": "ok"} | _states(service.models))

    @app.get(
        "/ready",
        summary="Readiness",
        description="200 once all models are loaded and warmed up, while one of them can score. "
        "With several models the answer gives the state of each; `?model=` selects one.",
        openapi_extra=WHICH_MODEL,
    )
    async def ready(request: Request) -> Response:
        named = _named(request, service.models)
        ready = service.ready if named is None else named.alive and not service.draining
        if not ready:
            raise _unavailable("not ready to score", service.models, LOST, LOADING)
        return json_response({"status": "ready"} | _states(service.models))


def add_pages(app: FastAPI, service: ScoringService, aliases: Mapping[str, str]) -> None:
    @app.get(
        MODELS_PATH,
        summary="Served models",
        description="The models' names and longest prompts, as `data` of OpenAI's API.",
    )
    async def models(request: Request) -> Response:
        cards = []
        for served in service.models:
            card = {"id": served.name, "object": "model", "created": 0, "owned_by": "gpuscore"}
            if served.loaded is not None:
                card["max_model_len"] = served.loaded.engine.limits.max_model_len
            cards.append(card)
        return json_response({"object": "list", "data": cards})

    @app.get(
        "/info",
        summary="Model and limits",
        description="Limits, prompt and formula of a served model, as in TEI's API.",
        openapi_extra=WHICH_MODEL,
    )
    def info(request: Request) -> Response:  # in a thread: it may ask git
        served = service.models.choose(request.query_params.get(MODEL))
        return json_response(server_info(served.name, served.ready(), aliases))

    @app.get(
        TOKENIZER_INFO_PATH,
        summary="Tokenizer",
        description="The tokenizer's special tokens and chat template, as in vLLM's API.",
        openapi_extra=WHICH_MODEL,
    )
    async def tokenizer_info(request: Request) -> Response:
        served = service.models.choose(request.query_params.get(MODEL))
        info = served.ready().tokenizer_info
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


def _named(request: Request, models: ModelTable) -> ServedModel | None:
    """Return the model that a probe asks for; None if it asks for all."""
    name = request.query_params.get(MODEL)
    return None if name is None else models.choose(name)


def _states(models: ModelTable) -> dict[str, Any]:
    """Return the state of each of several models."""
    if models.only is not None:
        return {}
    return {"models": {served.name: served.state for served in models}}


def _unavailable(why: str, models: ModelTable, *states: str) -> Unavailable:
    """Return an error that names the models in one of these states, if there are several models."""
    names = [served.name for served in models if served.state in states]
    affected = f": {listed(names)}" if names and models.only is None else ""
    return Unavailable(f"{why}{affected}", retry_after=LOADING_RETRY_AFTER)


ROOT = Path(__file__).parents[1] / "static"
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


def add_files(app: FastAPI, ui: bool) -> list[str]:
    """Add Swagger UI at /docs and, with `ui`, the playground and the status page; return the paths
    of all files."""
    pages = DOCS | UI if ui else DOCS
    folders = {(ROOT / name).parent for name in pages.values()}
    names = {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.iterdir()}
    files = pages | {f"/{name}": name for name in sorted(names.difference(pages.values()))}
    for path, name in files.items():
        app.add_api_route(path, _endpoint(name), methods=["GET"], include_in_schema=False)
    return list(files)


def _endpoint(name: str) -> Callable[[Request], Awaitable[Response]]:
    kind = TYPES[Path(name).suffix]

    async def file(request: Request) -> Response:
        return InPieces(_read(name), kind, HEADERS)

    return file


@cache
def _read(name: str) -> list[bytes]:
    """Return a file's bytes in pieces, which are kept from the first request on."""
    content = (ROOT / name).read_bytes()
    return [content[start : start + PIECE_SENT] for start in range(0, len(content), PIECE_SENT)]
