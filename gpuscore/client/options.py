"""The options of both clients and of all their calls."""

from dataclasses import dataclass
from typing import Any, TypedDict

import httpx

from gpuscore.client.retries import Policy
from gpuscore.client.split import MAX_BYTES, MAX_ITEMS, SplitLimits

LATE = (httpx.ReadTimeout, httpx.WriteTimeout)  # the attempt's time is over; not retried

MAX_ANSWER_BYTES = 2**28


class ClientOptions(TypedDict, total=False):
    """Options of a client.

    Attributes:
        timeout: seconds of one attempt, which the server is told; None: the server's own limit.
        deadline: seconds of a whole call with its retries and waits; 600 by default.
        max_attempts: attempts of one request; 5 by default.
        max_items_per_request: items of one request; 10,000 by default, as on the server.
        max_bytes_per_request: bytes of one body; 1 MiB by default.
        max_concurrent_requests: requests of one split call at a time; 4 by default.
        max_answer_bytes: bytes of one unpacked answer; 256 MiB by default. A larger one is a
            BadAnswer.
    """

    timeout: float | None
    deadline: float
    max_attempts: int
    max_items_per_request: int
    max_bytes_per_request: int
    max_concurrent_requests: int
    max_answer_bytes: int


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options that every call has.

    Args:
        model: the served model's name.
        priority: from -100 to 100; requests with a lower number run first.
        cache_salt: separates prefix caches of one API key.
        request_id: the request's id; if the call is split, each request's id begins with it.
    """

    model: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a body."""
        return given(model=self.model, priority=self.priority, cache_salt=self.cache_salt)


# The values that stand for a field's default on every route.
_DEFAULTS = {
    "apply_softmax": False,
    "temperature": 1.0,
    "item_first": False,
    "label_length_normalization": "none",
    "raw_scores": False,
    "truncate": False,
    "on_error": "fail",
    "add_special_tokens": True,
}


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields of a body without those that are None or have their default."""
    return {
        name: value
        for name, value in fields.items()
        if value is not None and (name not in _DEFAULTS or value != _DEFAULTS[name])
    }


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """A client's checked options."""

    url: str
    key: bytes | None
    policy: Policy
    limits: SplitLimits
    concurrency: int
    max_answer_bytes: int

    def request(
        self, method: str, path: str, fields: dict[str, str], seconds: float, content: bytes | None
    ) -> httpx.Request:
        """Return a request in which every single wait is at most `seconds`."""
        headers = [(name.encode(), value.encode()) for name, value in fields.items()]
        if self.key is not None:
            headers.append((b"Authorization", b"Bearer " + self.key))
        if content is not None:
            headers.append((b"Content-Type", b"application/json"))
        times = httpx.Timeout(seconds).as_dict()
        return httpx.Request(
            method, self.url + path, headers=headers, content=content, extensions={"timeout": times}
        )


def settings_of(
    url: str,
    api_key: str | None,
    *,
    timeout: float | None = None,
    deadline: float = 600.0,
    max_attempts: int = 5,
    max_items_per_request: int = MAX_ITEMS,
    max_bytes_per_request: int = MAX_BYTES,
    max_concurrent_requests: int = 4,
    max_answer_bytes: int = MAX_ANSWER_BYTES,
) -> ClientSettings:
    """Return the settings; raise ValueError for values out of range and for an invalid URL."""
    if not url.startswith(("http://", "https://")) or not httpx.URL(url).host:
        raise ValueError("url must begin with http:// or https:// and name a host")
    if max_concurrent_requests < 1:
        raise ValueError("max_concurrent_requests must be at least 1")
    if max_answer_bytes < 1:
        raise ValueError("max_answer_bytes must be at least 1")
    return ClientSettings(
        url.rstrip("/"),
        None if api_key is None else api_key.encode(),
        Policy(timeout, deadline, max_attempts),
        SplitLimits(max_items_per_request, max_bytes_per_request),
        max_concurrent_requests,
        max_answer_bytes,
    )
