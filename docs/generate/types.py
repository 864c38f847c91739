"""JSON schemas in words, and the structs that they contain."""

import json
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
_PLAIN = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false"}


def alternatives(schema: Schema) -> list[Schema]:
    """Return the schemas that a schema allows, without null."""
    return [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]


def words(schema: Schema) -> str:
    """Return the type in words, such as "text or list of integer"; a struct by its name."""
    texts = [_word(option) for option in alternatives(schema)]
    return " or ".join(dict.fromkeys(texts)) or "null"


def may_be_null(schema: Schema) -> bool:
    return any(option.get("type") == "null" for option in schema.get("anyOf", ()))


def structs(schema: Schema) -> Iterator[Schema]:
    """Yield the structs within a schema, outermost first."""
    for option in alternatives(schema):
        if "properties" in option:
            yield option
            for field in option["properties"].values():
                yield from structs(field)
        elif isinstance(option.get("items"), dict):
            yield from structs(option["items"])
        elif isinstance(option.get("additionalProperties"), dict):
            yield from structs(option["additionalProperties"])


def bounds(schema: Schema) -> str:
    """Return the limits of a value beyond its type, or "" if there are none."""
    for option in alternatives(schema):
        if "minimum" in option and "maximum" in option:
            return f"{option['minimum']:g} to {option['maximum']:g}"
        if "pattern" in option:
            return f"matches `{option['pattern']}`"
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
