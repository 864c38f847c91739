"""The options of both clients and of all their calls, and how a long list is split.

Every element is encoded once; the body of each of several requests is put together when it is sent.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import httpx

from gpuscore.client.retries import Policy
from gpuscore.config import RequestLimits
from gpuscore.types.call_arguments import (
    ClassifyOptions,
    FamilyOptions,
    ScoreOptions,
    checked_options,
    defaults,
)

MAX_ITEMS = RequestLimits().max_items
# The server takes 16 MiB and, by default, a million tokens; a byte is at most one token.
MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """The limits of one request; an element larger than `max_bytes` is sent alone.

    Raises:
        ValueError: a limit is less than 1.
    """

    max_items: int
    max_bytes: int

    def __post_init__(self) -> None:
        if self.max_items < 1 or self.max_bytes < 1:
            raise ValueError("max_items_per_request and max_bytes_per_request must be at least 1")


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON object with fields that all requests share, and lists that are split together.

    Args:
        shared: the fields.
        lists: elements as JSON; all of one length.
    """

    shared: Mapping[str, Any]
    lists: Mapping[str, Sequence[bytes]]

    def parts(self, limits: SplitLimits) -> Iterator[tuple[int, int]]:
        """Yield the range of elements of each request; one empty range if there are none."""
        left = limits.max_bytes - len(self._head())
        start, size = 0, 0
        sizes = [sum(map(len, row)) + len(row) for row in zip(*self.lists.values(), strict=True)]
        for i, element in enumerate(sizes):
            if i > start and (i - start == limits.max_items or size + element > left):
                yield start, i
                start, size = i, 0
            size += element
        yield start, len(sizes)

    def encode(self, start: int, stop: int) -> bytes:
        """Return the body with the elements of a range."""
        lists = [
            b"%s:[%s]" % (as_json(name), b",".join(elements[start:stop]))
            for name, elements in self.lists.items()
        ]
        head = self._head()
        return b"{" + b",".join([*([head] if head else []), *lists]) + b"}"

    def _head(self) -> bytes:
        return as_json(self.shared)[1:-1]


def as_json(value: object) -> bytes:
    """Encode as JSON; raise UnicodeEncodeError for a lone surrogate, ValueError for NaN."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


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
        max_answer_bytes: bytes of one unpacked answer; 256 MiB by default. A larger answer raises
            BadAnswer.
    """

    timeout: Annotated[float | None, None]
    deadline: Annotated[float, 600.0]
    max_attempts: Annotated[int, 5]
    max_items_per_request: Annotated[int, MAX_ITEMS]
    max_bytes_per_request: Annotated[int, MAX_BYTES]
    max_concurrent_requests: Annotated[int, 4]
    max_answer_bytes: Annotated[int, MAX_ANSWER_BYTES]


class RequestOptions(TypedDict, total=False):
    """Options of every call of a client.

    Attributes:
        model: the served model's name.
        priority: from -100 to 100; requests with a lower number run first.
        cache_salt: separates prefix caches of one API key.
        request_id: the request's id; if the call is split, each request's id begins with it.
    """

    model: Annotated[str | None, None]
    priority: Annotated[int | None, None]
    cache_salt: Annotated[str | None, None]
    request_id: Annotated[str | None, None]


class PromptOptions(TypedDict, total=False):
    """Options of `completions`.

    Attributes:
        max_tokens: 0, or 1 for the most probable next token, too.
        echo: return the prompt itself.
        logprobs: 0 for the returned tokens' log-probabilities, 1 to 20 for as many of the most
            probable tokens at each position, too; None for no log-probabilities.
        add_special_tokens: texts get the tokenizer's special tokens.
    """

    max_tokens: Annotated[int, 0]
    echo: Annotated[bool, True]
    logprobs: Annotated[int | None, 0]
    add_special_tokens: Annotated[bool, True]


class ScoreRequestOptions(ScoreOptions, RequestOptions, total=False):
    """Options of `score`."""


class FamilyRequestOptions(FamilyOptions, RequestOptions, total=False):
    """Options of `rerank` and `score_pairs`."""


class ClassifyRequestOptions(ClassifyOptions, RequestOptions, total=False):
    """Options of `classify`."""


class PromptRequestOptions(PromptOptions, RequestOptions, total=False):
    """Options of `completions`."""


def fields_of(kind: type, options: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Return the fields of a body for options of a kind; option and field have the same name.

    Args:
        kind: of the options.
        options: all of them. None and an option's default are left out: they mean the same.
        others: names of options that are no fields of this body.
    """
    own, left = defaults(kind), {"request_id", *others}
    return {
        name: value
        for name, value in options.items()
        if name not in left and value is not None and value != own[name]
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


def settings_of(url: str, api_key: str | None, unchecked: ClientOptions) -> ClientSettings:
    """Return the settings.

    Raises:
        TypeError: there is no such option.
        ValueError: a value is out of range, or the URL is invalid.
    """
    options = checked_options(ClientOptions, unchecked)
    if not url.startswith(("http://", "https://")) or not httpx.URL(url).host:
        raise ValueError("url must begin with http:// or https:// and name a host")
    for name in ("max_concurrent_requests", "max_answer_bytes"):
        if options[name] < 1:
            raise ValueError(f"{name} must be at least 1")
    return ClientSettings(
        url.rstrip("/"),
        None if api_key is None else api_key.encode(),
        Policy(options["timeout"], options["deadline"], options["max_attempts"]),
        SplitLimits(options["max_items_per_request"], options["max_bytes_per_request"]),
        options["max_concurrent_requests"],
        options["max_answer_bytes"],
    )
