"""A server under test: its properties, and the requests that checks send to it."""

import json
import ssl
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from tokenizers import Tokenizer

from gpuscore.errors import ConfigError
from gpuscore.types.batch import Float64Array

Ids = list[int]
LARGEST_VOCAB = 2**31 - 1
FEWEST = 64  # number of ids that the checks need
SAFE_VOCAB = 256  # ids to use if their number is unknown; every model has these
LONG_QUERY = 2000
CANARY = ([5, 6], [[7], [8, 9]])  # query and items that every model has


class RequestRefused(Exception):
    """A request that must succeed has failed; the message has the answer."""


class Skipped(Exception):
    """The check does not apply to this server; the message says why."""


@dataclass(frozen=True, slots=True)
class ServerReply:
    """A server's answer; without one, `status` is 0 and `text` has the reason."""

    status: int
    text: str

    @property
    def body(self) -> Any:
        """The answer's JSON, or None if it is not JSON."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None

    @property
    def message(self) -> str | None:
        """The message of an error in OpenAI's shape or in SGLang's flat one; None without one."""
        body = self.body if isinstance(self.body, dict) else {}
        error = body.get("error", body)
        text = error.get("message") if isinstance(error, dict) else None
        return text if isinstance(text, str) else None

    def __str__(self) -> str:
        return f"status {self.status}: {self.text[:200]}" if self.status else self.text


class PlainClient:
    """A thread-safe client that opens one connection per request.

    Args:
        url: http or https, with or without a path before /v1/score.
        key: sent as bearer token, or None.
        timeout: seconds for connecting and for every read.

    Raises:
        ConfigError: `url` is not such a URL.
    """

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"URL {url}: must begin with http:// or https:// and name a host")
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            headers={b"Authorization": f"Bearer {key}".encode()} if key else {},
            timeout=timeout,
            limits=httpx.Limits(max_keepalive_connections=0),
            verify=ssl.create_default_context(),  # certificates that the system trusts
            trust_env=False,
        )

    def score(self, body: object) -> ServerReply:
        return self.send("POST", "/v1/score", json.dumps(body).encode())

    def send(self, method: str, path: str, content: bytes | None = None) -> ServerReply:
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            answer = self._http.request(method, self.url + path, content=content, headers=headers)
            return ServerReply(answer.status_code, answer.content.decode(errors="replace"))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return ServerReply(0, f"no answer: {error!r}")


@dataclass(frozen=True, slots=True)
class Reference:
    """The served model's tokenizer on this machine, and scores computed from its files."""

    tokenizer: Tokenizer | None
    probabilities: Callable[[list[Ids], Ids], Float64Array]  # prompts, labels -> [N, labels]


@dataclass(frozen=True, slots=True)
class CheckedServer:
    """The properties of a server, and methods for requests with random token ids from a seed."""

    client: PlainClient
    model: str
    vocab: int  # valid ids are below it
    vocab_known: bool
    query_len: int  # tokens of the longest query tried that fits together with items
    texts: bool  # the server accepts text
    tolerance: float
    rng: np.random.RandomState
    labels: Ids
    reference: Reference | None = None
    canary: Float64Array | None = None  # scores of CANARY before any check

    def ids(self, length: int) -> Ids:
        drawn: Ids = self.rng.randint(0, self.vocab, length).tolist()
        return drawn

    def items(self, *lengths: int) -> list[Ids]:
        return [self.ids(length) for length in lengths]

    def encoder(self) -> Callable[..., Any]:
        """Return the tokenizer's `encode`; raise Skipped if texts cannot be compared by it."""
        if self.reference is None or self.reference.tokenizer is None or not self.texts:
            raise Skipped("needs --reference, with a tokenizer, and a server that takes text")
        return self.reference.tokenizer.encode

    def exact(self, prompts: list[Ids], labels: Ids) -> Float64Array:
        """Return the reference's softmax [prompts, labels]; raise Skipped without one."""
        if self.reference is None:
            raise Skipped("needs --reference")
        probabilities = self.reference.probabilities(prompts, labels)
        shares: Float64Array = probabilities / probabilities.sum(axis=1, keepdims=True)
        return shares

    def body(
        self, query: str | Ids, items: Sequence[str | Ids], labels: Ids | None = None, **more: Any
    ) -> dict[str, Any]:
        wanted = self.labels if labels is None else labels
        fields = {"query": query, "items": list(items), "label_token_ids": wanted}
        return fields | {"model": self.model, "apply_softmax": True} | more

    def send(self, *args: Any, **more: Any) -> ServerReply:
        return self.client.score(self.body(*args, **more))

    def ask(
        self, query: str | Ids, items: Sequence[str | Ids], labels: Ids | None = None, **more: Any
    ) -> Float64Array:
        """Return scores [N, labels], by default with softmax, which makes errors visible.

        Raises:
            RequestRefused: the answer is not a 200 with a table of that shape, all finite.
        """
        return self.scores(self.body(query, items, labels, **more))

    def scores(self, body: dict[str, Any]) -> Float64Array:
        """Return the scores of a request that must succeed; raises RequestRefused as `ask`."""
        num_labels = len(body["label_token_ids"])
        return self.table(self.client.score(body), len(body["items"]), num_labels)

    def table(
        self, reply: ServerReply, num_items: int, num_labels: int | None = None
    ) -> Float64Array:
        """Return an answer's scores [num_items, num_labels]; None allows any number of labels.

        Raises:
            RequestRefused: the answer is not a 200 with a table of that shape, all finite.
        """
        if reply.status != 200:
            raise RequestRefused(str(reply))
        try:
            scores = np.array(reply.body["scores"], dtype=np.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise RequestRefused(f"no table of numbers in scores: {error!r}") from error
        if num_labels is None and scores.ndim == 2:
            num_labels = scores.shape[1]
        if scores.shape != (num_items, num_labels) or num_labels == 0:
            wanted = num_labels or "at least 1"
            raise RequestRefused(
                f"scores is a table of {scores.shape}, not of ({num_items}, {wanted})"
            )
        if not np.isfinite(scores).all():
            raise RequestRefused("scores has numbers that are not finite")
        return scores

    def at_once(self, bodies: Sequence[dict[str, Any]]) -> list[ServerReply]:
        """Send requests concurrently; return their answers in order."""
        with ThreadPoolExecutor(max_workers=len(bodies)) as threads:
            return list(threads.map(self.client.score, bodies))

    def differ(self, expected: Float64Array, got: Float64Array) -> str | None:
        """Return how two tables differ, or None if only by rounding."""
        sizes = np.abs(expected - got)
        if sizes.max() <= self.tolerance and sizes.mean() <= self.tolerance / 2:
            return None
        return (
            f"differ by up to {sizes.max():.1e}, mean {sizes.mean():.1e}; rounding is up to "
            f"{self.tolerance:g}, mean {self.tolerance / 2:g}"
        )

    def first_ones(
        self, query: str | Ids, items: Sequence[str | Ids], counts: Sequence[int], others: str
    ) -> str | None:
        """Score the first few items without the others; return the difference, or None."""
        together = self.ask(query, items)
        for count in counts:
            if wrong := self.differ(together[:count], self.ask(query, items[:count])):
                return f"{count} {others} {wrong}"
        return None


def meet(
    client: PlainClient, tolerance: float, vocab: int | None, reference: Reference | None, seed: int
) -> CheckedServer:
    """Find out a server's properties.

    Args:
        client: of the server.
        tolerance: difference of probabilities that counts as rounding.
        vocab: valid ids are below it; None: found with some 30 requests for labels.
        reference: the served model on this machine, if it is there.
        seed: of the random ids.

    Raises:
        RequestRefused: the server does not answer a plain request.
    """
    model = _model_name(client)
    rng = np.random.RandomState(seed)
    body = {"model": model, "query": [5, 6], "items": [[7]], "label_token_ids": [3]}
    reply = client.score(body)
    if reply.status != 200:
        raise RequestRefused(f"a plain request of token ids gets {reply}")
    size = vocab or _find_vocab(lambda id: client.score(body | {"label_token_ids": [id]}))
    rows = size or SAFE_VOCAB
    server = CheckedServer(
        client=client,
        model=model,
        vocab=rows,
        vocab_known=size is not None,
        query_len=_find_query_len(lambda n: client.score(body | {"query": [5] * n})),
        texts=client.score(body | {"query": "a ", "items": ["b"]}).status == 200,
        tolerance=tolerance,
        rng=rng,
        labels=[int(id) for id in rng.choice(rows, 3, replace=False)],
        reference=reference,
    )
    return replace(server, canary=server.ask(*CANARY))


def _model_name(client: PlainClient) -> str:
    """Return the name in /v1/models, which sgl-jax requires in requests; else "default"."""
    body = client.send("GET", "/v1/models").body
    try:
        return str(body["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        return "default"


def _find_vocab(ask: Callable[[int], ServerReply]) -> int | None:
    """Find the first id that is refused as a label, by bisection; None if none is refused."""
    if ask(LARGEST_VOCAB).status == 200:
        return None
    ids = range(SAFE_VOCAB, LARGEST_VOCAB)
    return SAFE_VOCAB + bisect_left(ids, True, key=lambda id: ask(id).status != 200)


def _find_query_len(ask: Callable[[int], ServerReply]) -> int:
    """Return the largest of 2000, 1000, 500, ... tokens that leaves room for items."""
    length = LONG_QUERY
    while length > 32 and ask(length + 2 * max(64, length // 8)).status != 200:
        length //= 2
    return length
