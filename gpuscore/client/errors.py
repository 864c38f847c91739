"""The errors of the clients; each has the id of its request, as in the server's log."""

import re

# The ids that a server takes and makes.
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
LONGEST_TEXT = 1000  # characters of a server's text in an error
_ELEMENT = re.compile(r"(\w+)\[(\d+)\]")  # of a list


def plain(text: str) -> str:
    """Return a server's text for an error: at most LONGEST_TEXT characters, all printable."""
    shown = text[:LONGEST_TEXT]
    if not shown.isprintable():
        shown = "".join(
            character if character.isprintable() else character.encode("unicode_escape").decode()
            for character in shown
        )
    if max(len(text), len(shown)) <= LONGEST_TEXT:
        return shown
    more = f"... ({len(text)} characters)"
    return shown[: LONGEST_TEXT - len(more)] + more


class ClientError(Exception):
    """The base of all client errors. A server's text is cut, and its control characters are
    escaped.

    Attributes:
        message: what happened, without the request's id.
        request_id: the id that was sent as X-Request-Id.
    """

    def __init__(self, message: str, request_id: str) -> None:
        self.message = plain(message)
        self.request_id = plain(request_id)
        super().__init__(f"{self.message} (request {self.request_id})")


class StatusError(ClientError):
    """The server answered with an error.

    Attributes:
        status: the HTTP status.
        code: the server's error code, such as "prompt_too_long"; None if the answer has none, for
            example because a proxy between client and server wrote it.
        param: the field that caused the error, such as "items[3]"; or None.
        message: the server's message.
        retry_after: seconds to wait, for callers that try again after the client's own retries; or
            None.
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
        self.code = None if code is None else plain(code)
        self.param = None if param is None else plain(param)
        self.message = plain(message)
        self.retry_after = retry_after

    def moved(self, by: int) -> "StatusError":
        """Return the error of an element whose place in the whole list is higher by this number."""
        match = _ELEMENT.fullmatch(self.param or "")
        if not by or self.param is None or match is None:
            return self
        param = f"{match[1]}[{int(match[2]) + by}]"
        return StatusError(
            self.status,
            self.message.replace(self.param, param),
            self.request_id,
            code=self.code,
            param=param,
            retry_after=self.retry_after,
        )


class ConnectionFailed(ClientError):
    """No answer came in time, or the connection failed."""


class BadAnswer(ClientError):
    """The answer does not have the form that a gpuscore server gives."""
