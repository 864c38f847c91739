"""Checks of a request's head: its size, its id and its timeout."""

import re

from starlette.requests import Request
from starlette.types import Scope

from gpuscore.config import ServerConfig
from gpuscore.errors import GpuscoreError, HeaderTooLarge, InvalidRequest
from gpuscore.types.record import record_of

TIMEOUT_HEADER = "X-Request-Timeout-Ms"
_DIGITS = re.compile(r"[0-9]{1,9}")


def head_refusal(
    headers: list[tuple[bytes, bytes]], target: int, config: ServerConfig
) -> GpuscoreError | None:
    """Return the error of a head that is refused on every route, or None.

    `target` is the length of the request target in bytes.
    """
    size = target + sum(len(name) + len(value) + 4 for name, value in headers)
    if len(headers) > config.max_headers or size > config.max_header_bytes:
        return HeaderTooLarge(
            f"the request head has {len(headers)} fields and {size} bytes, the limits are "
            f"{config.max_headers} and {config.max_header_bytes}"
        )
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        # If a proxy reads by one length and we by the other, a body can smuggle in a request.
        return InvalidRequest("Content-Length and Transfer-Encoding exclude each other")
    return None


def check_request_id(scope: Scope) -> None:
    """Raise InvalidRequest for an id that logs could not show exactly as it was sent."""
    if record_of(scope).bad_request_id:
        raise InvalidRequest(
            "X-Request-Id must be given once, as 1 to 128 of A-Z a-z 0-9 . _ -",
            param="X-Request-Id",
        )


def request_seconds(request: Request, longest: float) -> float:
    """Return the seconds in which the request must be answered; `longest` without a header.

    Raises InvalidRequest unless the header is an integer of milliseconds from 1 to `longest`.
    """
    given = request.headers.getlist(TIMEOUT_HEADER)
    if not given:
        return longest
    most = int(longest * 1000)
    milliseconds = int(given[0]) if len(given) == 1 and _DIGITS.fullmatch(given[0]) else 0
    if not 1 <= milliseconds <= most:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER} must be given once, as an integer from 1 to {most}",
            param=TIMEOUT_HEADER,
        )
    return milliseconds / 1000
