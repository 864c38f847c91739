"""The reference pages of the HTTP routes: every field of every body and answer in /openapi.json."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from generate.markdown import block, code, page, table
from generate.types import Schema, bounds, default, may_be_null, structs, words
from gpuscore.dialects.paths import OPEN_PATHS

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Route:
    """An operation of the document, and all paths that have it."""

    method: str
    paths: tuple[str, ...]
    operation: dict[str, Any]

    @property
    def title(self) -> str:
        return str(self.operation["summary"])

    @property
    def file(self) -> str:
        return self.paths[0].strip("/").replace("/", "-") + ".md"

    @property
    def body(self) -> Schema | None:
        return _schema(self.operation.get("requestBody", {}))

    @property
    def answer(self) -> Schema | None:
        return _schema(self.operation["responses"].get("200", {}))


def _schema(holder: dict[str, Any]) -> Schema | None:
    schema: Schema | None = holder.get("content", {}).get(JSON, {}).get("schema")
    return schema


def routes(document: dict[str, Any]) -> list[Route]:
    """Return the routes in the document's order; paths with the same operation are one route."""
    merged: list[Route] = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            _add(merged, Route(method.upper(), (path,), operation))
    return merged


def _add(merged: list[Route], new: Route) -> None:
    for index, old in enumerate(merged):
        if (old.method, _meaning(old)) == (new.method, _meaning(new)):
            merged[index] = Route(old.method, old.paths + new.paths, old.operation)
            return
    merged.append(new)


def _meaning(route: Route) -> dict[str, Any]:
    own = ("operationId", "tags")
    return {key: value for key, value in route.operation.items() if key not in own}


def pages(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield file names and texts: an index, and a page for each route that takes a body."""
    listed = routes(document)
    yield "http.md", _index(listed)
    for route in listed:
        if route.body is not None:
            yield f"http/{route.file}", _page(route)


def _index(listed: list[Route]) -> str:
    rows = [
        (_paths(route), _linked(route), route.operation.get("description", "")) for route in listed
    ]
    return page(
        "HTTP API",
        "This page lists every route, as a running server describes it at `/openapi.json`. In a "
        "browser, `/docs` shows the same and sends requests, without the internet. "
        f"If the server has API keys, all routes except {_open()} need one: as "
        "`Authorization: Bearer KEY`, as `Authorization: KEY`, or as `X-Api-Key: KEY`. Bodies are "
        "JSON with `Content-Type: application/json`; an unknown field is an error. Errors are "
        "[listed by code](errors.md).",
        table(("route", "name", "description"), rows),
        "## Headers",
        _headers(listed),
    )


def _open() -> str:
    return ", ".join(code(path) for path in OPEN_PATHS)


def _headers(listed: list[Route]) -> str:
    named: dict[str, dict[str, Any]] = {}
    for route in listed:
        for parameter in route.operation.get("parameters", ()):
            if parameter["in"] == "header":
                named.setdefault(parameter["name"], parameter)
        for answer in route.operation["responses"].values():
            for name, header in answer.get("headers", {}).items():
                named.setdefault(name, header)
    rows = [(code(name), header.get("description", "")) for name, header in named.items()]
    return table(("header", "meaning"), rows)


def _paths(route: Route) -> str:
    return "<br>".join(code(f"{route.method} {path}") for path in route.paths)


def _linked(route: Route) -> str:
    return f"[{route.title}](http/{route.file})" if route.body is not None else route.title


def _page(route: Route) -> str:
    body, answer = route.body or {}, route.answer
    example = route.operation["requestBody"]["content"][JSON].get("example")
    blocks = [
        route.operation.get("description", ""),
        ", ".join(code(f"{route.method} {path}") for path in route.paths),
        "## Body",
        _choice(body),
        *_tables(body, "default"),
    ]
    if example is not None:
        blocks += ["## Example", block("json", _pretty(example))]
    if answer is not None:
        blocks += ["## Answer", _choice(answer), *_tables(answer, "given")]
    blocks += ["## Errors", _errors(route)]
    return page(route.title, *blocks)


def _choice(schema: Schema) -> str:
    """Return a sentence with the type of a body or an answer, unless that is one struct."""
    text = words(schema)
    return "" if text.startswith("[") and " or " not in text else f"Type: {text}."


def _tables(schema: Schema, presence: str) -> list[str]:
    """Return a heading and a table for each struct of a body ("default") or an answer ("given")."""
    blocks: list[str] = []
    seen: set[str] = set()
    for struct in structs(schema):
        if struct["title"] not in seen:
            seen.add(struct["title"])
            blocks += [
                f"### {struct['title']}",
                struct.get("description", ""),
                _fields(struct, presence),
            ]
    return blocks


def _fields(struct: Schema, presence: str) -> str:
    required = struct.get("required", ())
    rows = [
        (code(name), _type(field), _presence(presence, name in required, field), _meaning_of(field))
        for name, field in sorted(struct["properties"].items(), key=lambda pair: _refused(pair[1]))
    ]
    return table(("field", "type", presence, "meaning"), rows)


def _type(field: Schema) -> str:
    limits = bounds(field)
    text = words(field) + (f", {limits}" if limits else "")
    return f"{text}, or null" if may_be_null(field) else text


def _presence(column: str, required: bool, field: Schema) -> str:
    if column == "given":
        return _given(required, field)
    return "required" if required else default(field)


def _given(required: bool, field: Schema) -> str:
    """Return when an answer has a field: types leave out null and false where they are defaults."""
    if not required and may_be_null(field):
        return "if asked for"
    return "if true" if not required and field.get("default") is False else "always"


def _refused(field: Schema) -> bool:
    return bool(field.get("x-refused"))


def _meaning_of(field: Schema) -> str:
    text = str(field.get("description", ""))
    return f"**Not supported.** {text}" if _refused(field) else text


def _errors(route: Route) -> str:
    rows = [
        (status, ", ".join(map(code, str(answer["description"]).split(", "))))
        for status, answer in route.operation["responses"].items()
        if status != "200"
    ]
    return table(("status", "codes"), rows) + "\n\nMeanings and remedies: [errors](../errors.md)."


def _pretty(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
