"""Retries: 429, 502, 503 and lost connections are tried again.

This module neither waits nor sends. The clients pass it each outcome and the time, and it returns
how long to wait. Scoring changes nothing on the server, so every retry is safe.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import msgspec

from gpuscore.client.errors import ClientError, ConnectionFailed, StatusError

# Overloaded; not ready or restarting; a proxy answers 502 if its connection fails.
RETRIED = (429, 502, 503)
FIRST_BACKOFF = 0.25  # seconds; doubles with every attempt
LONGEST_BACKOFF = 15.0  # seconds
GRACE = 5.0  # seconds for an answer, such as the server's own 504, to arrive after the timeout
# Raised for bytes that are no JSON of the wanted shape, or nested too deep.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_SHOWN = 200  # characters of an answer that is not a gpuscore error


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits in seconds: `timeout` of an attempt (None: the server's), `deadline` of a whole call.

    Raises:
        ValueError: a value is out of range.
    """

    timeout: float | None
    deadline: float
    max_attempts: int

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout >= 0.001:
            raise ValueError(f"timeout is {self.timeout}, it must be at least 0.001 seconds")
        if not self.deadline > 0:
            raise ValueError(f"deadline is {self.deadline}, it must be over 0 seconds")
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.max_attempts}, it must be at least 1")


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer; lookups in `headers` ignore case."""

    status: int
    headers: Mapping[str, str]
    content: bytes | bytearray
    request_id: str


class Attempts:
    """The attempts of one request, up to the time `until` on the caller's clock."""

    def __init__(self, policy: Policy, request_id: str, until: float) -> None:
        self._policy, self._id, self._until = policy, request_id, until
        self._attempts = 0

    def begin(self, now: float) -> tuple[dict[str, str], float]:
        """Return the header fields of the next attempt, and the seconds to wait for its answer."""
        self._attempts += 1
        left = max(0.001, self._until - now)
        fields = {"X-Request-Id": self._id}
        if self._policy.timeout is None:
            return fields, left
        seconds = min(self._policy.timeout, left)
        fields["X-Request-Timeout-Ms"] = str(max(1, int(1000 * seconds)))
        return fields, min(seconds + GRACE, left)

    def answered(self, reply: Reply, now: float) -> float | None:
        """Return None for a success, or the seconds to wait before the next attempt.

        Raises:
            StatusError: the answer is an error, and there is no further attempt.
        """
        if 200 <= reply.status < 300:
            return None
        error = status_error(reply)
        return self._wait(error, error.retry_after, now, reply.status in RETRIED)

    def failed(self, cause: Exception, now: float, *, late: bool) -> float:
        """Return the seconds to wait after an attempt without an answer.

        Args:
            cause: the exception of the attempt.
            now: on the caller's clock.
            late: the attempt's time was over; there is no further attempt then.

        Raises:
            ConnectionFailed: there is no further attempt.
        """
        error = ConnectionFailed(f"no answer: {type(cause).__name__}: {cause}", self._id)
        return self._wait(error, None, now, not late)

    def _wait(
        self, error: ClientError, retry_after: float | None, now: float, again: bool
    ) -> float:
        """Return a random wait, not shorter than the server's Retry-After, or raise the error.

        The jitter keeps clients that failed together from retrying together.
        """
        seconds = random.uniform(0, _backoff(self._attempts))
        if retry_after is not None:
            seconds = retry_after + random.uniform(0, min(0.1 * retry_after, FIRST_BACKOFF))
        if not again or self._attempts >= self._policy.max_attempts or now + seconds >= self._until:
            raise error
        return seconds


def _backoff(attempts: int) -> float:
    return min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** (attempts - 1))


class _Error(msgspec.Struct):
    message: str
    code: str | None = None
    param: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _Error


def status_error(reply: Reply) -> StatusError:
    try:
        error = msgspec.json.decode(reply.content, type=_ErrorAnswer).error
    except UNREADABLE:  # not gpuscore's, maybe a proxy's
        error = _Error(reply.content[:_SHOWN].decode(errors="replace"))
    return StatusError(
        reply.status,
        error.message,
        reply.request_id,
        code=error.code,
        param=error.param,
        retry_after=_retry_after(reply.headers.get("retry-after")),
    )


def _retry_after(text: str | None) -> float | None:
    """Return the seconds of a Retry-After header, which has a number or a date."""
    if text is None:
        return None
    if text.strip().isdecimal():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (date.astimezone(UTC) - datetime.now(UTC)).total_seconds())
