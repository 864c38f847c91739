"""The wire: what a body of POST /v1/score may hold, and what the answer looks like."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gpuscore.errors import InvalidRequest
from gpuscore.text.prompts import ScoreInput

Text = str
Ids = list[int]
_KNOWN_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_AT_PATH = re.compile(r"^(.*?) - at `\$\.?([^`]*)`$", re.DOTALL)


CacheSalt = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
Priority = Annotated[int, Meta(ge=-100, le=100)]


class ScoreBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/score. `null` means a field's default."""

    # msgspec cannot tell list[str] from list[list[int]] in a union, so kinds are checked later.
    items: Text | list[Text | Ids] | None = None
    query: Text | Ids | None = None
    label_token_ids: list[int | Ids] | None = None
    labels: list[str] | None = None
    apply_softmax: bool | None = None
    temperature: float | None = None
    item_first: bool | None = None
    model: str | None = None
    return_label_logprobs: bool | None = None
    return_label_mass: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    # SGLang's further fields: understood, so that they can be refused by name.
    return_token_logprobs: bool | None = None
    return_pooled_hidden_states: bool | None = None
    score_extraction_token: str | None = None
    embed_override_token_id: int | None = None
    query_embed_overrides: list[list[float]] | None = None
    item_embed_overrides: list[list[list[float]] | None] | None = None

    @property
    def softmax(self) -> bool:
        return bool(self.apply_softmax)

    @property
    def need_lse(self) -> bool:
        return not self.softmax or bool(self.return_label_logprobs or self.return_label_mass)


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ScoreAnswer(msgspec.Struct, omit_defaults=True):
    """Answer of POST /v1/score."""

    scores: list[list[float]]
    model: str
    usage: Usage
    object: str
    label_logprobs: list[list[float]] | None = None
    label_mass: list[float] | None = None


_UNSUPPORTED = (
    "return_token_logprobs",
    "return_pooled_hidden_states",
    "score_extraction_token",
    "embed_override_token_id",
    "query_embed_overrides",
    "item_embed_overrides",
)
_decoder = msgspec.json.Decoder(ScoreBody)


def decode_body(body: bytes) -> ScoreBody:
    """Raises InvalidRequest whose message never holds the body's text."""
    with decoding_errors():
        decoded = _decoder.decode(body)
    for field in _UNSUPPORTED:
        value = getattr(decoded, field)
        if value is not None and value is not False:  # 0 == False, and 0 is a token id
            raise InvalidRequest(f"{field} is not supported by this server", param=field)
    return decoded


@contextmanager
def decoding_errors() -> Iterator[None]:
    """What msgspec raises, as InvalidRequest."""
    try:
        yield
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def to_input(body: ScoreBody) -> ScoreInput:
    """The request in the words of `text.prompts`; raises for fields that do not go together."""
    if body.items is None:
        raise InvalidRequest("items is required", param="items")
    return ScoreInput(
        query=body.query if body.query is not None else "",
        items=[body.items] if isinstance(body.items, str) else body.items,
        label_token_ids=body.label_token_ids,  # type: ignore[arg-type]
        labels=body.labels,
        item_first=bool(body.item_first),
        need_lse=body.need_lse,
        priority=body.priority or 0,
    )


def openapi_body(body: type[msgspec.Struct]) -> dict[str, Any]:
    """OpenAPI's description of a body, for /docs."""
    (_,), components = msgspec.json.schema_components([body])
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": components[body.__name__]}},
        }
    }


def _invalid(message: str) -> InvalidRequest:
    """msgspec's messages hold types, numbers and a path, except for an unknown field's name."""
    unknown = _UNKNOWN_FIELD.match(message)
    if unknown is not None:
        name = unknown.group(1)
        if _KNOWN_NAME.fullmatch(name):
            return InvalidRequest(f"unknown field {name}", param=name)
        return InvalidRequest("unknown field")
    at = _AT_PATH.match(message)
    if at is None:
        return InvalidRequest(message[:500])
    text, path = at.group(1), at.group(2)
    return InvalidRequest(f"{path}: {text}"[:500], param=path[:100] or None)
