"""One class per wire code. Messages are fixed text plus numbers and token ids, never input text."""

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
    status, code = 400, "invalid_request"


class MissingLabels(GpuscoreError):
    status, code = 400, "missing_labels"


class EmptyLabels(GpuscoreError):
    status, code = 400, "empty_labels"


class TokenIdOutOfRange(GpuscoreError):
    status, code = 400, "token_id_out_of_range"


class LabelNotSingleToken(GpuscoreError):
    status, code = 400, "label_not_single_token"


class MixedInputTypes(GpuscoreError):
    status, code = 400, "mixed_input_types"


class EmptyPrompt(GpuscoreError):
    status, code = 400, "empty_prompt"


class PromptTooLong(GpuscoreError):
    status, code = 400, "prompt_too_long"


class TooManyItems(GpuscoreError):
    status, code = 400, "too_many_items"


class TooManyLabels(GpuscoreError):
    status, code = 400, "too_many_labels"


class TooManyTokens(GpuscoreError):
    status, code = 400, "too_many_tokens"


class InvalidApiKey(GpuscoreError):
    status, code = 401, "invalid_api_key"


class NotFound(GpuscoreError):
    status, code = 404, "not_found"


class ModelNotFound(GpuscoreError):
    status, code = 404, "model_not_found"


class MethodNotAllowed(GpuscoreError):
    status, code = 405, "method_not_allowed"


class RequestTimeout(GpuscoreError):
    status, code = 408, "request_timeout"


class BodyTooLarge(GpuscoreError):
    status, code = 413, "body_too_large"


class UnsupportedMediaType(GpuscoreError):
    status, code = 415, "unsupported_media_type"


class Overloaded(GpuscoreError):
    status, code = 429, "overloaded"


class HeaderTooLarge(GpuscoreError):
    status, code = 431, "header_too_large"


class InternalError(GpuscoreError):
    status, code = 500, "internal_error"


class NonfiniteScore(GpuscoreError):
    status, code = 500, "nonfinite_score"


class Unavailable(GpuscoreError):
    status, code = 503, "unavailable"


class InsufficientMemory(GpuscoreError):
    status, code = 503, "insufficient_memory"


class DeadlineExceeded(GpuscoreError):
    status, code = 504, "deadline_exceeded"


class ConfigError(Exception):
    """A start-up refusal in one sentence: what is wrong, and what is supported."""


class EngineFailed(Exception):
    """The engine's process cannot be kept running; in one sentence why."""


class LoadTimeout(EngineFailed):
    """The model was not ready in time when the server started; another start may go better."""
