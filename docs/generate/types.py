"""JSON schemas in words, and the structs that they contain."""

import json
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
_PLAIN = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false"}


def alternatives(schema: Schema) -> list[Schema]:
    """Return the schemas that a schema allows, without null."""
    return [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]


def words(schema: Schema) -> str:
    """Return the type in words, such as "text or list of integer"; a struct by its name."""
    found = [_word(one) for one in alternatives(schema)]
    return " or ".join(dict.fromkeys(found)) or "null"


def may_be_null(schema: Schema) -> bool:
    return any(one.get("type") == "null" for one in schema.get("anyOf", ()))


def structs(schema: Schema) -> Iterator[Schema]:
    """Yield the structs within a schema, outermost first."""
    for one in alternatives(schema):
        if "properties" in one:
            yield one
            for field in one["properties"].values():
                yield from structs(field)
        elif isinstance(one.get("items"), dict):
            yield from structs(one["items"])
        elif isinstance(one.get("additionalProperties"), dict):
            yield from structs(one["additionalProperties"])


def bounds(schema: Schema) -> str:
    """Return the limits of a value beyond its type, or "" if there are none."""
    for one in alternatives(schema):
        if "minimum" in one and "maximum" in one:
            return f"{one['minimum']:g} to {one['maximum']:g}"
        if "pattern" in one:
            return f"matches `{one['pattern']}`"
    return ""


def default(schema: Schema) -> str:
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else ""


def _word(schema: Schema) -> str:
    if "title" in schema and "properties" in schema:
        return f"[{schema['title']}](#{schema['title'].lower()})"
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        item = words(schema.get("items", {}))
        return f"list of ({item})" if " or " in item else f"list of {item}"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"object of {words(values)}" if isinstance(values, dict) and values else "object"
    return _PLAIN.get(str(kind), "any JSON")
