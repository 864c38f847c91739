"""Promise: the OpenAPI document names every answer."""

import msgspec
import pytest

from gpuscore import errors
from gpuscore.dialects.answers import TeiError
from gpuscore.dialects.paths import GENERATING_PATHS
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.dialects.wire import ErrorAnswer
from gpuscore.server.api.openapi import ERRORS, refusals
from support.connections import KEYS, connected

NOT_OF_AN_OPERATION = {errors.NotFound, errors.MethodNotAllowed}


@pytest.fixture(scope="module")
def document(client):
    return client.get("/openapi.json").json()


@pytest.fixture(scope="module")
def guarded(limited):
    """The document of a server with keys."""
    return limited.get("/openapi.json").json()


def operations(document):
    return [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def resolved(document, part):
    while "$ref" in part:
        node = document
        for name in part["$ref"].removeprefix("#/").split("/"):
            node = node[name]
        part = node
    return part


def test_every_error_of_the_contract_is_named(guarded):
    """The answers of POST /v1/score name every code of the error table under its status."""
    named = {}
    for status, answer in guarded["paths"]["/v1/score"]["post"]["responses"].items():
        if status != "200":
            named[int(status)] = set(resolved(guarded, answer)["description"].split(", "))
    assert set(named) == {error.status for error in ERRORS if error is not errors.MethodNotAllowed}
    assert all(
        error.code in named[error.status] for error in ERRORS if error not in NOT_OF_AN_OPERATION
    )


def test_codes_are_those_of_the_operation(document):
    for method, path, operation in operations(document):
        codes: set[str] = set()
        for status, answer in operation["responses"].items():
            if status != "200":
                codes |= set(resolved(document, answer)["description"].split(", "))
        assert codes == {error.code for error in refusals(path, method, False)}, (method, path)


def test_errors_have_a_body_and_headers(guarded):
    for method, path, operation in operations(guarded):
        for status, answer in operation["responses"].items():
            answer = resolved(guarded, answer)
            assert "X-Request-Id" in answer["headers"], (method, path, status)
            assert ("Retry-After" in answer["headers"]) == (status in ("429", "503"))
            if status != "200":
                schema = answer["content"]["application/json"]["schema"]
                kinds = schema.get("anyOf", [schema])
                names = {kind["$ref"].rpartition("/")[2] for kind in kinds}
                ranks = path.endswith(("rerank", "reranking", "text-ranking"))
                assert names == ({"ErrorAnswer", "TeiError"} if ranks else {"ErrorAnswer"})


def test_types_of_metrics(client, document):
    named = document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    for accept in ("text/plain", "application/openmetrics-text;version=1.0.0"):
        answer = client.get("/metrics", headers={"accept": accept})
        assert answer.headers["content-type"].split(";")[0] in named
        assert answer.headers["content-type"].startswith(accept.split(";")[0])
    assert "application/json" not in named


def test_keys(document, guarded):
    assert "securitySchemes" not in document["components"]
    assert set(guarded["components"]["securitySchemes"]) == {"bearer", "key"}
    for method, path, operation in operations(document):
        assert "security" not in operation
        assert "401" not in operation["responses"], (method, path)
    open_paths = {path for _, path, operation in operations(guarded) if "security" not in operation}
    assert open_paths >= {"/health", "/ready"}
    assert "/metrics" not in open_paths


def test_routes_are_grouped_by_what_they_do(document):
    tags = [tag for _, _, operation in operations(document) for tag in operation["tags"]]
    assert len(tags) == len(operations(document))
    shown = [tag["name"] for tag in document["tags"]]
    assert list(dict.fromkeys(tags)) == shown
    assert tags == sorted(tags, key=shown.index)
    assert shown[-2:] == ["Aliases", "Always refused"]


def test_aliases_are_other_names_of_routes_in_groups(document):
    """An alias has a route's own answer; no two routes before the aliases have the same."""
    by_group: dict[str, list[str]] = {}
    for _, path, operation in operations(document):
        by_group.setdefault(operation["tags"][0], []).append(path)
    aliases, refused = by_group.pop("Aliases"), by_group.pop("Always refused")
    assert refused == list(GENERATING_PATHS)
    named = [
        DIALECT_OF[path] for paths in by_group.values() for path in paths if path in DIALECT_OF
    ]
    assert len({id(dialect) for dialect in named}) == len(named)
    assert all(DIALECT_OF[path] in named for path in aliases)
    assert {"/rerank", "/v2/rerank", "/classify"} <= {*aliases}


def test_what_generates_is_always_refused(document):
    for path in GENERATING_PATHS:
        assert "200" not in document["paths"][path]["post"]["responses"]


HOSTILE = {
    "no key": ({"x-api-key": "x"}, b"{}", 401),
    "a bad id": ({"x-request-id": "ä ö"}, b"{}", 400),
    "no JSON": ({}, b"{", 400),
    "another type": ({"content-type": "text/plain"}, b"{}", 415),
    "an unknown encoding": ({"content-encoding": "br"}, b"{}", 415),
    "a long body": ({}, b" " * (2**20 + 1), 413),
    "a long head": ({"x-long": "a" * 3000}, b"{}", 431),
    "no time": ({"x-request-timeout-ms": "0"}, b"{}", 400),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_real_answers_are_named(limited_server, guarded, name):
    """Send every operation a request that it has to refuse."""
    headers, body, status = HOSTILE[name]
    posts = [
        (path, operation) for method, path, operation in operations(guarded) if method == "post"
    ]
    with connected(limited_server, None if status == 401 else KEYS[0]) as client:
        for path, operation in posts:
            sent = {"content-type": "application/json"} | headers
            answer = client.post(path, content=body, headers=encoded(sent))
            assert answer.status_code == status, path
            named = resolved(guarded, operation["responses"][str(answer.status_code)])
            assert answer.headers["content-type"] in named["content"]
            form = TeiError if b'"error_type"' in answer.content else ErrorAnswer
            assert form is ErrorAnswer or form in DIALECT_OF[path].errors
            msgspec.json.decode(answer.content, type=form)


def encoded(headers):
    return [(name.encode(), value.encode()) for name, value in headers.items()]
