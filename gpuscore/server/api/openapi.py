"""The OpenAPI document: besides bodies and answers, groups of routes, every route's errors and
their bodies, the headers that are read and written, and the routes that need a key."""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi.encoders import jsonable_encoder
from fastapi.utils import deep_dict_update

from gpuscore import errors
from gpuscore.dialects.paths import ALIASES, GENERATING_PATHS, GROUPS, OPEN_PATHS
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.dialects.wire import ErrorAnswer, openapi_of
from gpuscore.errors import GpuscoreError

ERRORS = tuple(GpuscoreError.__subclasses__())
# Errors of a head, or of a request without a body, on any route.
_OF_HEADS: tuple[type[GpuscoreError], ...] = (
    errors.InvalidRequest,
    errors.RequestTimeout,
    errors.HeaderTooLarge,
    errors.InternalError,
)
_OF_BODIES: tuple[type[GpuscoreError], ...] = (
    *_OF_HEADS,
    errors.BodyTooLarge,
    errors.UnsupportedMediaType,
    errors.Overloaded,
    errors.Unavailable,
)
_OF_DIALECTS = tuple(
    error
    for error in ERRORS
    if error not in (errors.NotFound, errors.MethodNotAllowed, errors.InvalidApiKey)
)
_NEED_AN_ENGINE = frozenset(("/health", "/ready", "/info", "/tokenizer_info"))

_JSON = {"application/json": {"schema": {"type": "object"}}}
_TEXT = {"schema": {"type": "string"}}
_METRICS = {"text/plain": _TEXT, "application/openmetrics-text": _TEXT}
_ID = {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"}
_HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {
        "description": "The request's id, as in log lines and traces: the caller's own, or one "
        "made by the server",
        "required": True,
        "schema": _ID,
    },
    "Retry-After": {
        "description": "Seconds to wait before the next try",
        "schema": {"type": "integer", "minimum": 0},
    },
    "WWW-Authenticate": {
        "description": "The scheme by which a key is sent",
        "required": True,
        "schema": {"type": "string", "enum": ["Bearer"]},
    },
}
_MORE_HEADERS = {
    errors.Overloaded.status: ("Retry-After",),
    errors.Unavailable.status: ("Retry-After",),
    errors.InvalidApiKey.status: ("WWW-Authenticate",),
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "Authorization: Bearer KEY"},
    "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}


def complete(
    document: dict[str, Any], has_keys: bool, longest: int, aliases: Mapping[str, str]
) -> dict[str, Any]:
    """Complete FastAPI's document and return it.

    Args:
        has_keys: the server has API keys.
        longest: the most milliseconds that a caller may ask for as a timeout.
        aliases: further paths, each with the route that it stands for.
    """
    groups = list(GROUPS)
    in_order = sorted(document["paths"].items(), key=lambda item: groups.index(_group(item[0])))
    paths = document["paths"] = dict(in_order)
    document["tags"] = [{"name": name} for name in groups]
    for path, operations in paths.items():
        for method, operation in operations.items():
            _complete_operation(operation, path, method, has_keys=has_keys, longest=longest)
    for path, route in aliases.items():
        paths[path] = {
            method: operation | {"tags": [ALIASES], "operationId": f"{method} {path}"}
            for method, operation in paths[route].items()
        }
    types = {kind for dialect in DIALECT_OF.values() for kind in dialect.errors} | {ErrorAnswer}
    ordered = sorted(types, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    document["components"] = {"schemas": schemas}
    if has_keys:
        document["components"]["securitySchemes"] = _KEYS
    return document


def refusals(path: str, method: str, has_keys: bool) -> tuple[type[GpuscoreError], ...]:
    """Return every error that an operation may be answered with."""
    refused = list(_OF_HEADS)
    if path in _NEED_AN_ENGINE:
        refused += [errors.Unavailable, errors.ModelNotFound]
    if method == "post":
        refused = list(_OF_BODIES if path in GENERATING_PATHS else _OF_DIALECTS)
    if has_keys and path not in OPEN_PATHS:
        refused.append(errors.InvalidApiKey)
    return tuple(refused)


def _group(path: str) -> str:
    """Return the group of a route, which is its tag; routes that no group names are aliases."""
    return next((name for name, paths in GROUPS.items() if path in paths), ALIASES)


def _complete_operation(
    operation: dict[str, Any], path: str, method: str, has_keys: bool, longest: int
) -> None:
    if dialect := DIALECT_OF.get(path):  # at a start this would take longer than all else
        described = openapi_of(dialect.bodies, dialect.answers, dialect.example)
        deep_dict_update(operation, jsonable_encoder(described, exclude_none=True))
    operation["tags"] = [_group(path)]
    operation["parameters"] = [*operation.get("parameters", []), *_parameters(method, longest)]
    if has_keys and path not in OPEN_PATHS:
        operation["security"] = [{name: []} for name in _KEYS]
    answers = operation["responses"]
    if path in GENERATING_PATHS:
        del answers["200"]
    else:
        answers["200"]["headers"] = {"X-Request-Id": _HEADERS["X-Request-Id"]}
    if method == "get":
        answers["200"]["content"] = _METRICS if path == "/metrics" else _JSON
    types = dialect.errors if dialect else (ErrorAnswer,)
    schemas = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in types]
    refused = refusals(path, method, has_keys)
    for status in sorted({error.status for error in refused}):
        codes = [error.code for error in ERRORS if error.status == status and error in refused]
        names = ("X-Request-Id", *_MORE_HEADERS.get(status, ()))
        answers[str(status)] = {
            "description": ", ".join(codes),
            "headers": {name: _HEADERS[name] for name in names},
            "content": {"application/json": {"schema": {"anyOf": schemas}}},
        }


def _parameters(method: str, longest: int) -> list[dict[str, Any]]:
    """Return the headers that every caller may send."""
    described = {
        "X-Request-Id": (
            "1 to 128 of `A-Z a-z 0-9 . _ -`; anything else gets 400. Without it, the server makes "
            "an id",
            _ID,
        ),
        "traceparent": (
            "W3C trace context: if traces are exported, the request's span joins this trace",
            {"type": "string"},
        ),
        "X-Request-Timeout-Ms": (
            "Milliseconds from the complete body to the answer, at most `--request-timeout`; then "
            "the answer is 504, and the rest of the request is dropped",
            {"type": "integer", "minimum": 1, "maximum": longest},
        ),
    }
    if method != "post":
        del described["X-Request-Timeout-Ms"]
    return [
        {"name": name, "in": "header", "description": text, "schema": schema}
        for name, (text, schema) in described.items()
    ]
