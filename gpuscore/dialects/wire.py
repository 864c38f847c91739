"""Parts that all dialects share: descriptions of fields, structs of answers, errors, OpenAPI.

A field is `Annotated[type | None, about(...)]`; `null` means the same as leaving the field out. The
descriptions are the only source of /openapi.json and of the reference.
"""

from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from gpuscore.errors import GpuscoreError, Overloaded
from gpuscore.types.request import Terms

# msgspec writes a field's own default, which is null nearly everywhere. The value that null stands
# for is kept under another name, and `openapi_of` makes it the default.
DEFAULT = "x-default"
SCORES_ONLY = "this server scores only and generates nothing"


def about(text: str, default: bool | int | float | str | None = None) -> Meta:
    """Describe a field.

    Args:
        text: its meaning, in a sentence.
        default: the value that null stands for, if there is one.
    """
    extra = None if default is None else {DEFAULT: default}
    return Meta(description=text, extra_json_schema=extra)


ModelName = Annotated[
    str | None,
    about(
        "A served model's name (see GET /v1/models); any other name is answered 404. null and "
        "`default` mean the only model; a server of several models answers 400."
    ),
]
ReturnMass = Annotated[
    bool | None,
    about(
        "Adds `label_mass`: the probability of all labels together, over the whole vocabulary. A "
        "mass near 0 means that the model would have said something else.",
        False,
    ),
]

StructT = TypeVar("StructT", bound=msgspec.Struct)


class ScoringBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The fields that all bodies with texts to score have."""

    terms: ClassVar[Terms]  # no field: set by `decoding.strict_decoder`
    model: ModelName = None
    priority: Annotated[
        Annotated[int, Meta(ge=-100, le=100)] | None,
        about("Requests with a lower number run first.", 0),
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")] | None,
        about(
            "Separates prefix caches: a request finds only what requests with the same API key and "
            "the same salt have cached."
        ),
    ] = None


PromptTokens = Annotated[int, about("Tokens of all prompts, each counted as a whole.")]
TotalTokens = Annotated[int, about("Tokens of prompts and of what was generated.")]


class FailedItem(msgspec.Struct):
    """An item that was not scored, because the request has `on_error: null`."""

    index: Annotated[int, about("Number of the item in the request, from 0.")]
    code: Annotated[str, about("The code of the error that the item would get alone.")]
    message: Annotated[str, about("That error's message.")]


FailedItems = Annotated[
    list[FailedItem] | None,
    about("With `on_error: null`: the items without a score, by index; empty if there are none."),
]


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
    """Return the schema with every reference replaced; no type of ours contains itself."""
    if isinstance(schema, list):
        return [_inlined(element, components) for element in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(components[schema["$ref"].rpartition("/")[2]], components)
    # A discriminator's mapping refers to named types, and those are gone.
    shown = {k: _inlined(v, components) for k, v in schema.items() if k != "discriminator"}
    if DEFAULT in shown:
        shown["default"] = shown.pop(DEFAULT)
    return shown


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct, omit_defaults=True):
    error: ErrorBody
    detail: str | None = None  # Jina's and Infinity's clients show it


def error_body(error: GpuscoreError) -> ErrorBody:
    # After an "invalid_request_error", LiteLLM never retries, whatever the status is.
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    kind = "rate_limit_error" if isinstance(error, Overloaded) else kind
    return ErrorBody(error.message, kind, error.param, error.code)


def encode_error(error: GpuscoreError, variant: str = "") -> bytes:
    """Return `{"error": {...}}` as JSON; these bodies have no variants."""
    return msgspec.json.encode(ErrorAnswer(error_body(error)))
