"""The options of both clients and of their methods."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import httpx

from gpuscore.client.results import Ids
from gpuscore.client.retries import Policy, Reply
from gpuscore.client.split import MAX_BYTES, MAX_ITEMS, SplitLimits

LATE = (httpx.ReadTimeout, httpx.WriteTimeout)  # the attempt's time is over; not retried


class ClientOptions(TypedDict, total=False):
    """Options of a client.

    Attributes:
        timeout: seconds of one attempt, which the server is told; None: the server's own limit.
        deadline: seconds of a whole call with its retries; 600 by default.
        max_attempts: attempts of one request; 5 by default.
        max_items_per_request: items of one request; 10,000 by default, as on the server.
        max_bytes_per_request: bytes of one body; 1 MiB by default.
        max_concurrent_requests: requests of one split call at a time; 4 by default.
    """

    timeout: float | None
    deadline: float
    max_attempts: int
    max_items_per_request: int
    max_bytes_per_request: int
    max_concurrent_requests: int


class ScoreOptions(TypedDict, total=False):
    """Options of `score`, with the meaning of the same fields of POST /v1/score.

    Attributes:
        labels: texts of one token each, or names of classes.
        label_token_ids: token ids, or numbers of classes; one list, or one per item.
        apply_softmax: normalise over the labels instead of the vocabulary.
        temperature: divides the logits; other than 1.0 only with apply_softmax.
        item_first: prompts are item + query.
        return_label_logprobs: return `label_logprobs`.
        return_label_mass: return `label_mass`.
        model: the served model's name.
        priority: from -100 to 100; requests with a lower number run first.
        cache_salt: separates prefix caches of one API key.
        request_id: the request's id; if the call is split, each request's id begins with it.
    """

    labels: Sequence[str]
    label_token_ids: Ids | Sequence[Ids]
    apply_softmax: bool
    temperature: float
    item_first: bool
    return_label_logprobs: bool
    return_label_mass: bool
    model: str
    priority: int
    cache_salt: str
    request_id: str


class RerankOptions(TypedDict, total=False):
    """Options of `rerank`, with the meaning of the same fields of POST /v1/rerank.

    Attributes:
        top_n: number of best documents, of the whole list even if it is split; None: all.
        instruction: replaces the prompt family's own.
        return_documents: return the given documents; the server does not send them back.
        raw_scores: return raw scores instead of relevances from 0 to 1.
        rank_fields: the fields to rank by, for documents that are mappings.
        max_tokens_per_doc: cut longer documents at their end.
        truncate: cut documents whose prompts would not fit the model.
        model: the served model's name.
        priority: from -100 to 100; requests with a lower number run first.
        cache_salt: separates prefix caches of one API key.
        request_id: the request's id; if the call is split, each request's id begins with it.
    """

    top_n: int | None
    instruction: str | None
    return_documents: bool
    raw_scores: bool
    rank_fields: Sequence[str]
    max_tokens_per_doc: int
    truncate: bool
    model: str
    priority: int
    cache_salt: str
    request_id: str


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """A client's checked options."""

    url: str
    key: bytes | None
    policy: Policy
    limits: SplitLimits
    concurrency: int

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
) -> ClientSettings:
    """Return the settings; raise ValueError for values out of range and for an invalid URL."""
    if not url.startswith(("http://", "https://")) or not httpx.URL(url).host:
        raise ValueError("url must begin with http:// or https:// and name a host")
    if max_concurrent_requests < 1:
        raise ValueError("max_concurrent_requests must be at least 1")
    return ClientSettings(
        url.rstrip("/"),
        None if api_key is None else api_key.encode(),
        Policy(timeout, deadline, max_attempts),
        SplitLimits(max_items_per_request, max_bytes_per_request),
        max_concurrent_requests,
    )


def reply_of(answer: httpx.Response, request_id: str) -> Reply:
    """Return the reply of an answer whose body has been read."""
    found = answer.headers.get("x-request-id", request_id)
    return Reply(answer.status_code, answer.headers, answer.content, found)
