"""One class per wire code. Messages are fixed text plus numbers and token ids, never input text.

A class's docstring is what the reference says of its code: what it means, then the remedy.
"""

from typing import ClassVar


class GpuscoreError(Exception):
    """Base of every error that a caller can see; subclasses fix the HTTP status and the code."""

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
        """The word that OpenAI's clients know; LiteLLM takes an "invalid_request_error" for a
        request that must not be tried again, whatever its status."""
        if self.status == Overloaded.status:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"


class InvalidRequest(GpuscoreError):
    """A header, the body or one of its fields is not what the route takes.

    Remedy: Correct what the message and `param` name; the same request will fail again.
    """

    status, code = 400, "invalid_request"


class MissingLabels(GpuscoreError):
    """Neither the request nor the model says which labels to score.

    Remedy: Send `labels` or `label_token_ids`, or start the server with `--family`.
    """

    status, code = 400, "missing_labels"


class EmptyLabels(GpuscoreError):
    """A list of labels is empty.

    Remedy: Give every item at least one label.
    """

    status, code = 400, "empty_labels"


class TokenIdOutOfRange(GpuscoreError):
    """A token id is none of the model's, or a class number none of its classes.

    Remedy: Use ids of the served model's tokenizer; the message has the valid range.
    """

    status, code = 400, "token_id_out_of_range"


class LabelNotSingleToken(GpuscoreError):
    """A label text is no single token, so it has no next-token probability.

    Remedy: Choose another text (a leading space matters) or send ids; the message lists the tokens.
    """

    status, code = 400, "label_not_single_token"


class MixedInputTypes(GpuscoreError):
    """Texts and token ids are mixed in one request.

    Remedy: Send all of them as texts or all as token ids.
    """

    status, code = 400, "mixed_input_types"


class EmptyPrompt(GpuscoreError):
    """A prompt has no tokens.

    Remedy: Send a query, an item, or both, with at least one token.
    """

    status, code = 400, "empty_prompt"


class PromptTooLong(GpuscoreError):
    """A prompt is longer than the model or `--max-model-len` allows.

    Remedy: Shorten it; `/rerank` and guards cut documents where `truncate` asks for it.
    """

    status, code = 400, "prompt_too_long"


class TooManyItems(GpuscoreError):
    """The request has more items than `--max-items`.

    Remedy: Send several requests, or raise the limit; the Python client splits by itself.
    """

    status, code = 400, "too_many_items"


class TooManyLabels(GpuscoreError):
    """An item has more labels than `--max-labels`.

    Remedy: Ask for fewer labels, or raise the limit.
    """

    status, code = 400, "too_many_labels"


class TooManyTokens(GpuscoreError):
    """The request has more tokens than `--max-request-tokens`, or than an answer can report.

    Remedy: Send several requests, or raise the limit.
    """

    status, code = 400, "too_many_tokens"


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
    """The path exists and does not take that method.

    Remedy: See the list of routes in `/openapi.json`.
    """

    status, code = 405, "method_not_allowed"


class RequestTimeout(GpuscoreError):
    """The request did not arrive within `--header-timeout` or `--body-timeout`.

    Remedy: Send it again over a faster connection, or raise the timeout.
    """

    status, code = 408, "request_timeout"


class BodyTooLarge(GpuscoreError):
    """The body is larger than `--max-body-bytes`.

    Remedy: Send several requests, or raise the limit.
    """

    status, code = 413, "body_too_large"


class UnsupportedMediaType(GpuscoreError):
    """The body's media type is not JSON, or it is compressed.

    Remedy: Send uncompressed JSON with `Content-Type: application/json`.
    """

    status, code = 415, "unsupported_media_type"


class Overloaded(GpuscoreError):
    """The server has too much to do: one of its limits on work in flight is reached.

    Remedy: Send it again after the seconds of `Retry-After`; if it lasts, add a server.
    """

    status, code = 429, "overloaded"


class HeaderTooLarge(GpuscoreError):
    """The request's head is larger than `--max-header-bytes` or `--max-headers`.

    Remedy: Send fewer or shorter header fields, or raise the limit.
    """

    status, code = 431, "header_too_large"


class InternalError(GpuscoreError):
    """A defect of the server; the log has the request's id and the exception.

    Remedy: Report it with the log's lines. Other requests are not affected.
    """

    status, code = 500, "internal_error"


class NonfiniteScore(GpuscoreError):
    """The model computed a NaN or an infinity, twice.

    Remedy: Use another number format (`--dtype float32`); check the checkpoint.
    """

    status, code = 500, "nonfinite_score"


class Unavailable(GpuscoreError):
    """The model is loading, the engine is being restarted, or the server is shutting down.

    Remedy: Send it again after the seconds of `Retry-After`.
    """

    status, code = 503, "unavailable"


class InsufficientMemory(GpuscoreError):
    """The device has too little memory for the request, even in the smallest batches.

    Remedy: Shorten the prompts, lower `--kv-cache-size`, or use a larger device.
    """

    status, code = 503, "insufficient_memory"


class DeadlineExceeded(GpuscoreError):
    """No answer within `--request-timeout` or the request's own `X-Request-Timeout-Ms`.

    Remedy: Allow more time, or send smaller requests.
    """

    status, code = 504, "deadline_exceeded"


class ConfigError(Exception):
    """A start-up refusal in one sentence: what is wrong, and what is supported."""


class EngineFailed(Exception):
    """The engine's process cannot be kept running; in one sentence why."""


class LoadTimeout(EngineFailed):
    """The model was not ready in time when the server started; another start may go better."""
