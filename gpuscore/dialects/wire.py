"""Parts that all dialects share: descriptions of fields, structs of answers, errors, OpenAPI.

A field is `Annotated[type | None, about(...)]`; `null` means the same as leaving the field out. The
descriptions are the only source of /openapi.json and of the reference.
"""

import difflib
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import filterfalse
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from gpuscore.config import RequestLimits
from gpuscore.dialects.others import check_others, others_of
from gpuscore.dialects.parts import PartsDecoder
from gpuscore.errors import GpuscoreError, InvalidRequest
from gpuscore.types.record import RequestRecord
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

    terms: ClassVar[Terms]  # no field: set by `strict_decoder`
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


class ItemsBody(ScoringBody, kw_only=True):
    """The fields of bodies whose items may fail alone."""

    on_error: Annotated[
        Annotated[str, Meta(pattern=r"^(fail|null)\Z")] | None,
        about(
            "What an item that cannot be scored does. `fail`: it fails the request. `null`: it "
            "gets no score and stands in `errors`, and the others are scored. Errors of the whole "
            "request are the same with both.",
            "fail",
        ),
    ] = None


_KNOWN_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_CHOICES = re.compile(r"Expected `str` matching regex '\^\((.*)\)\\\\Z'")
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


def strict_decoder(
    body: type[StructT], check: Callable[[StructT], None] = lambda _: None
) -> Callable[[bytes, RequestRecord, RequestLimits | None], StructT]:
    """Return the `decode` of a dialect: it decodes JSON as this struct, and checks it.

    `decode` raises InvalidRequest, whose message never holds the body's text. A body with texts to
    score gets its terms, for which the record needs its tenant and its deadline.
    """
    at_once, in_parts = msgspec.json.Decoder(body), PartsDecoder(body)

    def decoded(data: bytes, record: RequestRecord, limits: RequestLimits | None) -> StructT:
        with _decoding_errors(body):
            data.decode()  # because msgspec takes bytes that are not UTF-8 as Raw
            fields = at_once.decode(data) if limits is None else in_parts.decode(data, limits)
            check_others(fields)
        if isinstance(fields, ScoringBody):
            salt = engine_salt(record.tenant, fields.cache_salt)
            fields.__dict__["terms"] = Terms(fields.priority or 0, salt, record.deadline)
        check(fields)
        return fields

    return decoded


def engine_salt(tenant: str | None, salt: str | None) -> str:
    """Return the salt that two requests must have in common to share a cached prefix.

    It always depends on the key's owner: a hit shows in `cached_tokens` and in time, so a shared
    cache would tell one owner which queries another has sent. The caller's salt can only narrow it
    further. It is hashed, so that neither a caller's text nor a key's digest reaches the engine.
    """
    return hashlib.sha256(f"{tenant or ''}:{salt or ''}".encode()).hexdigest()


@contextmanager
def _decoding_errors(body: type[msgspec.Struct]) -> Iterator[None]:
    """Turn every error that msgspec raises while decoding a body into InvalidRequest, whose message
    never holds the body's text."""
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


def _invalid(message: str, body: type[msgspec.Struct]) -> InvalidRequest:
    """Return msgspec's message about a body as InvalidRequest, without text of the caller's.

    The messages hold types, numbers and a path; only the name of an unknown field is the caller's.
    """
    unknown = _UNKNOWN_FIELD.match(message)
    if unknown is not None:
        name = unknown.group(1)
        if _KNOWN_NAME.fullmatch(name):
            ours = [*filterfalse(others_of(body).__contains__, body.__struct_encode_fields__)]
            close = difflib.get_close_matches(name, ours, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            return InvalidRequest(f"unknown field {name}{meant}", param=name)
        return InvalidRequest("unknown field")
    at = _AT_PATH.match(message)
    if at is None:
        return InvalidRequest(message[:500])
    text = _CHOICES.sub(lambda found: f"must be one of {found[1].replace('|', ', ')}", at[1])
    path = at[2]
    return InvalidRequest(f"{path}: {text}"[:500], param=path[:100] or None)


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct, omit_defaults=True):
    error: ErrorBody
    detail: str | None = None  # Jina's and Infinity's clients show it


def error_body(error: GpuscoreError) -> ErrorBody:
    return ErrorBody(error.message, error.type, error.param, error.code)


def encode_error(error: GpuscoreError, variant: str = "") -> bytes:
    """Return `{"error": {...}}` as JSON; these bodies have no variants."""
    return msgspec.json.encode(ErrorAnswer(error_body(error)))
