"""The errors that callers can get, one class per code.

Messages are fixed text with numbers and token ids, never a caller's text. The reference copies each
class's docstring: the meaning of its code, then the remedy.
"""

import re
from typing import ClassVar


class GpuscoreError(Exception):
    """Base of every error that a caller can see; subclasses set the HTTP status.

    The code is the class's name in lower case, with an underscore between words.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init_subclass__(cls, *, status: int) -> None:
        cls.status = status
        cls.code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after  # seconds


class InvalidRequest(GpuscoreError, status=400):
    """A header, the body or one of its fields is not valid for the route.

    Remedy: Correct the header or field that the message names; the same request will fail again.
    """


class MissingLabels(GpuscoreError, status=400):
    """The request names no labels, and the model has no default labels.

    Remedy: Send `labels` or `label_token_ids`, or start the server with `--family`.
    """


class EmptyLabels(GpuscoreError, status=400):
    """A list of labels is empty, or a label has no token.

    Remedy: Give every item at least one label, and every label at least one token.
    """


class TokenIdOutOfRange(GpuscoreError, status=400):
    """A token id or the number of a class does not exist in the model.

    Remedy: Use ids of the served model's tokenizer; the message gives the valid range.
    """


class MixedInputTypes(GpuscoreError, status=400):
    """One request has both texts and token ids.

    Remedy: Send all of them as texts or all as token ids.
    """


class EmptyPrompt(GpuscoreError, status=400):
    """A prompt has no tokens.

    Remedy: Send a query, an item, or both, with at least one token.
    """


class NoExtractionToken(GpuscoreError, status=400):
    """An item does not contain the token of `score_extraction_token`, so it has no scores.

    Remedy: Put the token after each candidate of the item.
    """


class PromptTooLong(GpuscoreError, status=400):
    """A prompt, with a label of several tokens after it, is longer than the model or
    `--max-model-len` allows.

    Remedy: Shorten it; `/rerank` and guards truncate documents if `truncate` is true.
    """


class TooManyItems(GpuscoreError, status=400):
    """The request has more items than `--max-items`.

    Remedy: Send several requests, or raise the limit.
    """


class TooManyLabels(GpuscoreError, status=400):
    """An item has more labels than `--max-labels`, or the request more than an answer may hold.

    Remedy: Send fewer labels, or raise the limit.
    """


class TooManyTokens(GpuscoreError, status=400):
    """The request has more tokens than `--max-request-tokens`, or than one answer may hold, or a
    label has more than 32.

    Remedy: Send several requests, shorten the label, or raise the limit.
    """


class AnswerTooLarge(GpuscoreError, status=400):
    """The answer could become larger than `--max-answer-bytes`; the message has both numbers.

    Remedy: Send several requests, ask for less (`return_label_logprobs`, `echo`, `logprobs`), or
    raise the limit.
    """


class InvalidApiKey(GpuscoreError, status=401):
    """The request has no valid API key, or more than one.

    Remedy: Send one key as `Authorization: Bearer KEY` or `X-Api-Key: KEY`.
    """


class NotFound(GpuscoreError, status=404):
    """There is no such path.

    Remedy: See the list of routes in `/openapi.json`.
    """


class ModelNotFound(GpuscoreError, status=404):
    """`model` names another model than the served one.

    Remedy: Send the name that `GET /v1/models` shows, or leave `model` out.
    """


class MethodNotAllowed(GpuscoreError, status=405):
    """The path exists but does not have that method.

    Remedy: See the list of routes in `/openapi.json`.
    """


class RequestTimeout(GpuscoreError, status=408):
    """The request did not arrive within `--client-timeout`.

    Remedy: Send it again over a faster connection, or raise the timeout.
    """


class BodyTooLarge(GpuscoreError, status=413):
    """The body is larger than `--max-body-bytes`, or becomes larger when it is decompressed.

    Remedy: Send several requests, or raise the limit.
    """


class UnsupportedMediaType(GpuscoreError, status=415):
    """The body's media type is not JSON, or its content encoding is not gzip.

    Remedy: Send JSON with `Content-Type: application/json`, plain or in gzip.
    """


class Overloaded(GpuscoreError, status=429):
    """The server is overloaded: one of its limits on work in flight is reached.

    Remedy: Send the request again after the seconds of `Retry-After`; if the error lasts, add a
    server.
    """


class HeaderTooLarge(GpuscoreError, status=431):
    """The request's head is larger than `--max-header-bytes`.

    Remedy: Send fewer or shorter header fields, or raise the limit.
    """


class InternalError(GpuscoreError, status=500):
    """A bug in the server; the log has the request's id and the exception.

    Remedy: Report it with the lines of the log. Other requests are not affected.
    """


class NonfiniteScore(GpuscoreError, status=500):
    """The model computed a NaN or an infinity, and did so again when it was retried.

    Remedy: Use another number format (`--dtype float32`); check the checkpoint.
    """


class Unavailable(GpuscoreError, status=503):
    """The model is loading, the engine is being restarted, or the server is shutting down.

    Remedy: Send the request again after the seconds of `Retry-After`.
    """


class InsufficientMemory(GpuscoreError, status=503):
    """The device has too little memory for the request, even in the smallest batches.

    Remedy: Shorten the prompts, lower `--kv-cache-size`, or use a larger device.
    """


class DeadlineExceeded(GpuscoreError, status=504):
    """There was no answer within `--request-timeout` or the request's own `X-Request-Timeout-Ms`.

    Remedy: Allow more time, or send smaller requests.
    """


class ConfigError(Exception):
    """A refusal to start; one sentence names the cause and the supported values."""


class UsageError(ConfigError):
    """The command line names something that does not exist, such as a column: exit code 2."""


class EngineFailed(Exception):
    """The engine's process cannot be kept running; one sentence names the cause."""


class LoadTimeout(EngineFailed):
    """The model was not ready in time when the server started; another start may succeed."""


def causes(error: BaseException) -> list[BaseException]:
    """Return an error and all errors that led to it, each of them once."""
    chain = [error]
    for cause in chain:  # the list grows while it is read
        chain += filter(None, {cause.__cause__, cause.__context__} - {*chain})
    return chain
