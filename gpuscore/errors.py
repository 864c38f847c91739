"""The errors that callers can get, one class per code.

Messages are fixed text with numbers and token ids, never a caller's text. The reference copies each
class's docstring: the meaning of its code, then the remedy.
"""

from collections.abc import Iterator
from typing import ClassVar


class GpuscoreError(Exception):
    """Base of every error that a caller can see; subclasses set the HTTP status and the code."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after  # seconds

    @property
    def type(self) -> str:
        """The error type in OpenAI's terms. After an "invalid_request_error", LiteLLM never retries
        the request, whatever the status is."""
        if self.status == Overloaded.status:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"


class InvalidRequest(GpuscoreError):
    """A header, the body or one of its fields is not valid for the route.

    Remedy: Correct the header or field that the message names; the same request will fail again.
    """

    status, code = 400, "invalid_request"


class MissingLabels(GpuscoreError):
    """The request names no labels, and the model has no default labels.

    Remedy: Send `labels` or `label_token_ids`, or start the server with `--family`.
    """

    status, code = 400, "missing_labels"


class EmptyLabels(GpuscoreError):
    """A list of labels is empty, or a label has no token.

    Remedy: Give every item at least one label, and every label at least one token.
    """

    status, code = 400, "empty_labels"


class TokenIdOutOfRange(GpuscoreError):
    """A token id or the number of a class does not exist in the model.

    Remedy: Use ids of the served model's tokenizer; the message gives the valid range.
    """

    status, code = 400, "token_id_out_of_range"


class LabelNotSingleToken(GpuscoreError):
    """A label text of `/v1/classify` is not a single token; the message lists its tokens.

    Remedy: Choose another text (a leading space matters), or ask `/v1/score`, which takes labels of
    several tokens.
    """

    status, code = 400, "label_not_single_token"


class MixedInputTypes(GpuscoreError):
    """One request has both texts and token ids.

    Remedy: Send all of them as texts or all as token ids.
    """

    status, code = 400, "mixed_input_types"


class EmptyPrompt(GpuscoreError):
    """A prompt has no tokens.

    Remedy: Send a query, an item, or both, with at least one token.
    """

    status, code = 400, "empty_prompt"


class PromptTooLong(GpuscoreError):
    """A prompt, with a label of several tokens after it, is longer than the model or
    `--max-model-len` allows.

    Remedy: Shorten it; `/rerank` and guards cut documents if `truncate` is true.
    """

    status, code = 400, "prompt_too_long"


class TooManyItems(GpuscoreError):
    """The request has more items than `--max-items`.

    Remedy: Send several requests, or raise the limit; the Python client splits requests itself.
    """

    status, code = 400, "too_many_items"


class TooManyLabels(GpuscoreError):
    """An item has more labels than `--max-labels`.

    Remedy: Ask for fewer labels, or raise the limit.
    """

    status, code = 400, "too_many_labels"


class TooManyTokens(GpuscoreError):
    """The request has more tokens than `--max-request-tokens`, or than one answer may hold, or a
    label has more than `--max-label-tokens`.

    Remedy: Send several requests, shorten the label, or raise the limit.
    """

    status, code = 400, "too_many_tokens"


class AnswerTooLarge(GpuscoreError):
    """The answer could become larger than `--max-answer-bytes`; the message has both numbers.

    Remedy: Send several requests, ask for less (`return_label_logprobs`, `echo`, `logprobs`), or
    raise the limit.
    """

    status, code = 400, "answer_too_large"


class InvalidApiKey(GpuscoreError):
    """The request has no valid API key, or several.

    Remedy: Send one key as `Authorization: Bearer KEY` or `X-Api-Key: KEY`.
    """

    status, code = 401, "invalid_api_key"


class NotFound(GpuscoreError):
    """There is no such path.

    Remedy: See the list of routes in `/openapi.json`.
    """

    status, code = 404, "not_found"


class ModelNotFound(GpuscoreError):
    """`model` names another model than the served one.

    Remedy: Send the name that `GET /v1/models` shows, or leave `model` out.
    """

    status, code = 404, "model_not_found"


class MethodNotAllowed(GpuscoreError):
    """The path exists but does not have that method.

    Remedy: See the list of routes in `/openapi.json`.
    """

    status, code = 405, "method_not_allowed"


class RequestTimeout(GpuscoreError):
    """The request did not arrive within `--header-timeout` or `--body-timeout`.

    Remedy: Send it again over a faster connection, or raise the timeout.
    """

    status, code = 408, "request_timeout"


class BodyTooLarge(GpuscoreError):
    """The body is larger than `--max-body-bytes`, or becomes so when it is unpacked.

    Remedy: Send several requests, or raise the limit.
    """

    status, code = 413, "body_too_large"


class UnsupportedMediaType(GpuscoreError):
    """The body's media type is not JSON, or its content encoding is neither gzip nor zstd.

    Remedy: Send JSON with `Content-Type: application/json`, plain or with one of these encodings.
    """

    status, code = 415, "unsupported_media_type"


class Overloaded(GpuscoreError):
    """The server is overloaded: one of its limits on work in flight is reached.

    Remedy: Send the request again after the seconds of `Retry-After`; if the error lasts, add a
    server.
    """

    status, code = 429, "overloaded"


class HeaderTooLarge(GpuscoreError):
    """The request's head is larger than `--max-header-bytes` or `--max-headers`.

    Remedy: Send fewer or shorter header fields, or raise the limit.
    """

    status, code = 431, "header_too_large"


class InternalError(GpuscoreError):
    """A bug in the server; the log has the request's id and the exception.

    Remedy: Report it with the lines of the log. Other requests are not affected.
    """

    status, code = 500, "internal_error"


class NonfiniteScore(GpuscoreError):
    """The model computed a NaN or an infinity, and did so again when it was retried.

    Remedy: Use another number format (`--dtype float32`); check the checkpoint.
    """

    status, code = 500, "nonfinite_score"


class Unavailable(GpuscoreError):
    """The model is loading, the engine is being restarted, or the server is shutting down.

    Remedy: Send the request again after the seconds of `Retry-After`.
    """

    status, code = 503, "unavailable"


class InsufficientMemory(GpuscoreError):
    """The device has too little memory for the request, even in the smallest batches.

    Remedy: Shorten the prompts, lower `--kv-cache-size`, or use a larger device.
    """

    status, code = 503, "insufficient_memory"


class DeadlineExceeded(GpuscoreError):
    """There was no answer within `--request-timeout` or the request's own `X-Request-Timeout-Ms`.

    Remedy: Allow more time, or send smaller requests.
    """

    status, code = 504, "deadline_exceeded"


class ConfigError(Exception):
    """A refusal to start; one sentence names the cause and the supported values."""


class UsageError(ConfigError):
    """The command line asks for what is not there, such as a column: exit code 2."""


class EngineFailed(Exception):
    """The engine's process cannot be kept running; one sentence names the cause."""


class LoadTimeout(EngineFailed):
    """The model was not ready in time when the server started; another start may succeed."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and, once each, the errors that led to it."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [other for other in (one.__cause__, one.__context__) if other is not None]
