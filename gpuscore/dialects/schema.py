"""Parts that the bodies and answers of all dialects share: usage, decoding errors, JSON schemas."""

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec

from gpuscore.dialects.fields import DEFAULT, about
from gpuscore.errors import InvalidRequest
from gpuscore.types.item_errors import ItemError

_KNOWN_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_AT_PATH = re.compile(r"^(.*?) - at `\$\.?([^`]*)`$", re.DOTALL)


PromptTokens = Annotated[int, about("Tokens of all prompts, each counted as a whole.")]
TotalTokens = Annotated[int, about("Tokens of prompts and of what was generated.")]


class FailedItem(msgspec.Struct):
    """An item that was not scored, because the request has `on_error: null`."""

    index: Annotated[int, about("Number of the item in the request, from 0.")]
    code: Annotated[str, about("The code of the error that it would be alone.")]
    message: Annotated[str, about("That error's message.")]


FailedItems = Annotated[
    list[FailedItem] | None,
    about("With `on_error: null`: the items without a score, by index; empty if there are none."),
]


def failed_items(errors: Sequence[ItemError] | None) -> list[FailedItem] | None:
    """Return errors as an answer shows them; None if the request did not ask for them."""
    if errors is None:
        return None
    return [FailedItem(error.index, error.code, error.message) for error in errors]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: Annotated[int, about("Prompt tokens that no forward pass computed.")]


class TokenUsage(msgspec.Struct):
    prompt_tokens: PromptTokens
    total_tokens: TotalTokens
    completion_tokens: Annotated[int, about("Tokens generated.")]
    prompt_tokens_details: PromptTokensDetails


class ShortUsage(msgspec.Struct):
    """Usage as rerankers report it."""

    prompt_tokens: PromptTokens
    total_tokens: TotalTokens
    prompt_tokens_details: PromptTokensDetails


def short_usage(tokens: int, cached: int) -> ShortUsage:
    return ShortUsage(tokens, tokens, PromptTokensDetails(cached))


@contextmanager
def decoding_errors(body: type[msgspec.Struct]) -> Iterator[None]:
    """Turn every error that msgspec raises while decoding a body into InvalidRequest."""
    try:
        yield
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise _invalid(str(error), body) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def check_not_negative(body: msgspec.Struct, *fields: str) -> None:
    """Raise InvalidRequest for the first of these fields that is below 0."""
    for field in fields:
        value = getattr(body, field)
        if value is not None and value < 0:
            raise InvalidRequest(f"{field} is {value}, it must not be negative", param=field)


def openapi_of(
    bodies: tuple[Any, ...], answers: tuple[Any, ...], example: object
) -> dict[str, Any]:
    """Return the OpenAPI description of a route's bodies and answers; `openapi` adds the errors.

    Types are written out where they are used, not referred to.
    """
    body = {"schema": _schema(bodies), "example": example}
    done = {"description": "Done", "content": {"application/json": {"schema": _schema(answers)}}}
    return {
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {"200": done} if answers else {},
    }


def _schema(types: tuple[Any, ...]) -> Any:
    schemas, components = msgspec.json.schema_components(types)
    shown = [_inlined(schema, components) for schema in schemas]
    return shown[0] if len(shown) == 1 else {"anyOf": shown}


def _inlined(schema: Any, components: dict[str, Any]) -> Any:
    """Return the schema with every reference replaced; none of our types contains itself."""
    if isinstance(schema, list):
        return [_inlined(one, components) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(components[schema["$ref"].rpartition("/")[2]], components)
    # A discriminator's mapping refers to named types, and those are gone.
    shown = {k: _inlined(v, components) for k, v in schema.items() if k != "discriminator"}
    if DEFAULT in shown:
        shown["default"] = shown.pop(DEFAULT)
    return shown


def _invalid(message: str, body: type[msgspec.Struct]) -> InvalidRequest:
    """Return msgspec's message about a body as InvalidRequest, without text of the caller's.

    The messages hold types, numbers and a path; only the name of an unknown field is the caller's.
    """
    unknown = _UNKNOWN_FIELD.match(message)
    if unknown is not None:
        name = unknown.group(1)
        if _KNOWN_NAME.fullmatch(name):
            close = difflib.get_close_matches(name, body.__struct_encode_fields__, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            return InvalidRequest(f"unknown field {name}{meant}", param=name)
        return InvalidRequest("unknown field")
    at = _AT_PATH.match(message)
    if at is None:
        return InvalidRequest(message[:500])
    text, path = at.group(1), at.group(2)
    return InvalidRequest(f"{path}: {text}"[:500], param=path[:100] or None)
