"""Promise: /openapi.json explains every field, and every field marked as refused is refused."""

import json
import re

import pytest
from generate.types import structs

from gpuscore.dialects.paths import TEXT_RANKING_PATH
from gpuscore.dialects.table import DIALECT_OF, DIALECTS
from gpuscore.dialects.wire import openapi_of

JSON = "application/json"
PAIRS = {"queries": "a lamp", "documents": ["A lamp."]}


@pytest.fixture(scope="module")
def paths(demo):
    return demo.get("/openapi.json").json()["paths"]


def bodies(dialect):
    """Return the schemas of a dialect's possible bodies."""
    schema = openapi_of(dialect.bodies, (), dialect.example)["requestBody"]["content"][JSON]
    return schema["schema"].get("anyOf", [schema["schema"]])


@pytest.mark.parametrize("path", sorted(DIALECT_OF))
def test_every_field_of_every_body_and_answer_is_explained(paths, path):
    operation = paths[path]["post"]
    schemas = [operation["requestBody"]["content"][JSON]["schema"]]
    if "200" in operation["responses"]:
        schemas.append(operation["responses"]["200"]["content"][JSON]["schema"])
    count = 0
    for schema in schemas:
        for struct in structs(schema):
            for name, field in struct["properties"].items():
                nested = any(structs(field))
                count += 1
                assert nested or "const" in field or "enum" in field or field.get("description"), (
                    struct["title"],
                    name,
                )
    assert count


def test_what_is_marked_as_refused_is_refused_by_name(demo):
    """test_peers.py has the values that are accepted."""
    count = 0
    for dialect in DIALECTS:
        for body in bodies(dialect):
            example = PAIRS if body["title"] == "PairsBody" else dialect.example
            for name, field in body["properties"].items():
                if field.get("x-refused"):
                    count += 1
                    answer = demo.post(dialect.paths[0], json=example | {name: {"not": "neutral"}})
                    assert answer.status_code == 400, (body["title"], name)
                    assert answer.json()["error"]["param"] == name
    assert count > 100


KINDS = {"string": str, "number": int | float, "integer": int, "boolean": bool, "array": list}
VALUES = (True, 1, 1.5, -101, 101, "", "a b", "ü", "x" * 65, {}, [], ["a"])
LISTS = ([1], [1.5], [True], [None], [{}], [[1]], [["a"]], [[{}]])  # for fields that take a list


def fits(schema, value):
    """Return True if a value is of the kind that a field's schema says."""
    if "anyOf" in schema:
        return any(fits(one, value) for one in schema["anyOf"])
    kind = schema.get("type")
    if kind is None or kind == "object":
        return kind is None or isinstance(value, dict)
    if kind == "null" or not isinstance(value, KINDS[kind]):
        return value is None and kind == "null"
    if kind != "boolean" and isinstance(value, bool):
        return False
    if kind == "array":
        return all(fits(schema.get("items", {}), entry) for entry in value)
    if kind == "string":
        return re.search(schema.get("pattern", ""), value) is not None
    return schema.get("minimum", value) <= value <= schema.get("maximum", value)


@pytest.mark.parametrize("path", [dialect.paths[0] for dialect in DIALECTS])
def test_values_of_another_kind_are_refused_by_name(demo, path):
    wrong, count, dialect = [], 0, DIALECT_OF[path]
    for body in bodies(dialect):
        example = PAIRS if body["title"] == "PairsBody" else dialect.example
        fields = body["properties"] if dialect.answers else {}
        for name, field in fields.items():
            for value in (*VALUES, *(LISTS if "array" in json.dumps(field) else ())):
                if not field.get("x-refused") and not fits(field, value):
                    count += 1
                    answer = demo.post(path, json=example | {name: value})
                    said = answer.json().get("error", {})
                    told = said if isinstance(said, str) else str(said.get("param"))
                    if answer.status_code != 400 or not told.startswith(name):
                        wrong.append((body["title"], name, value, answer.text))
    assert not wrong
    assert count > 20 or not dialect.answers or path == TEXT_RANKING_PATH  # a body in its one field


def defaults():
    """Yield (path, body without defaults, {name: default}) for every field that names a default;
    those of a body that its example leaves out come together."""
    for dialect in DIALECTS:
        for body in bodies(dialect):
            if body["title"] == "RefusedBody":
                continue
            example = PAIRS if body["title"] == "PairsBody" else dialect.example
            properties = body["properties"].items()
            named = {name: field["default"] for name, field in properties if "default" in field}
            for name in named.keys() & example.keys():
                left = {key: value for key, value in example.items() if key != name}
                yield dialect.paths[0], left, {name: named[name]}
            others = {name: named[name] for name in named.keys() - example.keys()}
            yield dialect.paths[0], example, others


def test_defaults_are_those_that_null_stands_for(demo):
    wrong = []
    for path, without, added in defaults():
        plain, full = (demo.post(path, json=body) for body in (without, without | added))
        # The labels have nearly all of the demo model's probability: normalising over them or over
        # the whole vocabulary differs only in the fifth digit.
        same = _numbers(plain.json()) == pytest.approx(_numbers(full.json()), abs=1e-6)
        if plain.status_code != full.status_code or not same:
            wrong.append((path, added, full.text))
    assert not wrong


def _numbers(answer):
    """Return all floats of an answer, in order."""
    if isinstance(answer, float):
        return [answer]
    inner = answer.values() if isinstance(answer, dict) else answer
    if not isinstance(answer, dict | list):
        return []
    return [number for value in inner for number in _numbers(value)]
