"""Errors as JSON, in the shape of every dialect that has no shape of its own."""

import msgspec

from gpuscore.errors import GpuscoreError


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct, omit_defaults=True):
    error: ErrorBody
    detail: str | None = None  # Jina's and Infinity's clients read it
    message: str | None = None  # Cohere's clients read it


def error_body(error: GpuscoreError) -> ErrorBody:
    return ErrorBody(error.message, error.type, error.param, error.code)


def encode_error(error: GpuscoreError, variant: str = "") -> bytes:
    """Return `{"error": {...}}` as JSON; the variant makes no difference."""
    return msgspec.json.encode(ErrorAnswer(error_body(error)))
