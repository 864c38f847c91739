"""The OpenAPI document: besides bodies and answers, groups of routes, every route's errors and
their bodies, the headers that are read and written, and the routes that need a key."""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI

from gpuscore import errors
from gpuscore.dialects.paths import ALIASES, GENERATING_PATHS, GROUPS, OPEN_PATHS
from gpuscore.dialects.served import LOADING, LOST, READY
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.dialects.wire import ErrorAnswer
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

_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_STATUS = {"type": "object", "properties": {"status": {"type": "string"}}, "required": ["status"]}
_MODELS = {  # only of a server of several
    "type": "object",
    "additionalProperties": {"type": "string", "enum": [LOADING, READY, LOST]},
}
_STATES = _STATUS | {"properties": {"status": {"type": "string"}, "models": _MODELS}}
_TEXT = {"schema": {"type": "string"}}
# Answers of the routes that have no dialect, and so no answer type.
_PAGES: dict[str, dict[str, Any]] = {
    "/livez": {"application/json": {"schema": _STATUS}},
    "/health": {"application/json": {"schema": _STATES}},
    "/ready": {"application/json": {"schema": _STATES}},
    "/metrics": {"text/plain": _TEXT, "application/openmetrics-text": _TEXT},
}
_ID = {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"}
_HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {
        "description": "The request's id, as in log lines and traces: the caller's own, or one "
        "made by the server",
        "required": True,
        "schema": _ID,
    },
    "Server-Timing": {
        "description": "With `--timing-headers`: milliseconds of each stage, which reveal cache "
        "hits",
        "schema": {"type": "string"},
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


class DocumentedApp(FastAPI):
    """A FastAPI application whose OpenAPI document has groups, errors, headers and keys.

    Args:
        has_keys: the server has API keys.
        longest: the most milliseconds that a caller may ask for as a timeout.
        aliases: further paths, each with the route that it stands for.
        more: for FastAPI.
    """

    def __init__(
        self, has_keys: bool, longest: int, aliases: Mapping[str, str], **more: Any
    ) -> None:
        super().__init__(**more)
        self._has_keys, self._longest, self._aliases = has_keys, longest, aliases

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            document = super().openapi()
            _complete(document, self._has_keys, self._longest)
            _add_aliases(document["paths"], self._aliases)
        return self.openapi_schema or {}


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


def _complete(document: dict[str, Any], has_keys: bool, longest: int) -> None:
    responses: dict[str, Any] = {}
    groups = list(GROUPS)
    document["tags"] = [{"name": name} for name in groups]
    in_order = sorted(document["paths"].items(), key=lambda item: groups.index(group_of(item[0])))
    document["paths"] = dict(in_order)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses |= _complete_operation(operation, path, method, has_keys)
    document["components"] = {
        "schemas": _schemas(),
        "responses": responses,
        "headers": _HEADERS,
        "parameters": _parameters(longest),
    } | ({"securitySchemes": _KEYS} if has_keys else {})


def group_of(path: str) -> str:
    """Return the group of a route, which is its tag; routes that no group names are aliases."""
    return next((name for name, paths in GROUPS.items() if path in paths), ALIASES)


def _add_aliases(paths: dict[str, Any], aliases: Mapping[str, str]) -> None:
    """Describe each further path as its route, under ids of its own."""
    for path, route in aliases.items():
        paths[path] = {
            method: operation | {"tags": [ALIASES], "operationId": f"{method} {path}"}
            for method, operation in paths[route].items()
        }


def _complete_operation(
    operation: dict[str, Any], path: str, method: str, has_keys: bool
) -> dict[str, Any]:
    """Complete an operation where FastAPI cannot; return the error responses it refers to."""
    read = ["X-Request-Id", "traceparent"]
    if method == "post":
        read.append("X-Request-Timeout-Ms")
    own = operation.get("parameters", [])
    operation["parameters"] = own + [_reference("parameters", name) for name in read]
    if has_keys and path not in OPEN_PATHS:
        operation["security"] = [{name: []} for name in _KEYS]
    answers = operation["responses"]
    if path in GENERATING_PATHS:
        del answers["200"]
    else:
        answers["200"]["headers"] = _header_references("X-Request-Id", "Server-Timing")
    if method == "get":
        answers["200"]["content"] = _PAGES.get(path, _OBJECT)
    dialect = DIALECT_OF.get(path)
    types = (ErrorAnswer,) if dialect is None else dialect.errors
    refused = refusals(path, method, has_keys)
    responses: dict[str, Any] = {}
    for status in sorted({error.status for error in refused}):
        every = [error for error in ERRORS if error.status == status]
        codes = [error.code for error in every if error in refused]
        some = codes if len(codes) < len(every) else []
        name = "-".join([*(kind.__name__ for kind in types), str(status), *some])
        answers[str(status)] = _reference("responses", name)
        responses[name] = _response(types, status, codes)
    return responses


def _response(
    types: tuple[type[msgspec.Struct], ...], status: int, codes: list[str]
) -> dict[str, Any]:
    """Return the description of an error response; its body has one of the types."""
    schemas = [_reference("schemas", kind.__name__) for kind in types]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {
        "description": ", ".join(codes),
        "headers": _header_references("X-Request-Id", *_MORE_HEADERS.get(status, ())),
        "content": {"application/json": {"schema": schema}},
    }


def _parameters(longest: int) -> dict[str, Any]:
    """Return the headers that every caller may send."""
    described = {
        "X-Request-Id": (
            "1 to 128 of `A-Z a-z 0-9 . _ -`; anything else gets 400. Without it, the server makes "
            "an id",
            _ID,
        ),
        "X-Request-Timeout-Ms": (
            "Milliseconds from the complete body to the answer, at most `--request-timeout`; then "
            "the answer is 504, and the rest of the request is dropped",
            {"type": "integer", "minimum": 1, "maximum": longest},
        ),
        "traceparent": (
            "W3C trace context: if traces are exported, the request's span joins this trace",
            {"type": "string"},
        ),
    }
    return {
        name: {"name": name, "in": "header", "description": text, "schema": schema}
        for name, (text, schema) in described.items()
    }


def _schemas() -> dict[str, Any]:
    types = {kind for dialect in DIALECT_OF.values() for kind in dialect.errors} | {ErrorAnswer}
    ordered = sorted(types, key=lambda kind: kind.__name__)
    return msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")[1]


def _header_references(*names: str) -> dict[str, Any]:
    return {name: _reference("headers", name) for name in names}


def _reference(kind: str, name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/{kind}/{name}"}
