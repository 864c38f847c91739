"""What a client raises; every error knows the id of its request, which the server's log has too."""


class ClientError(Exception):
    """Base of the others. `request_id` is what went out as X-Request-Id."""

    def __init__(self, message: str, request_id: str) -> None:
        super().__init__(f"{message} (request {request_id})")
        self.message = message
        self.request_id = request_id


class StatusError(ClientError):
    """The server answered with an error.

    `code` and `param` are the error's own, such as "prompt_too_long" and "items[3]", or None where
    the answer has none: then somebody between client and server wrote it. `retry_after` is in
    seconds, for whoever wants to try again after the client has given up.
    """

    def __init__(
        self,
        status: int,
        message: str,
        request_id: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{status} {code or 'error'}: {message}", request_id)
        self.status = status
        self.code = code
        self.param = param
        self.message = message
        self.retry_after = retry_after


class ConnectionFailed(ClientError):
    """No answer came, or not in time."""


class BadAnswer(ClientError):
    """An answer that no gpuscore server gives."""
