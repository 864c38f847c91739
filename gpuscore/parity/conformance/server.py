"""A server under test: what is known of it, and how the checks ask it."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from gpuscore.arrays import Float64Array
from gpuscore.parity.conformance.client import PlainClient, ServerReply

Ids = list[int]
LARGEST_VOCAB = 2**31 - 1
FEWEST = 64  # ids that the checks need
SAFE_VOCAB = 256  # where the number of ids is not known; no model has fewer
LONG_QUERY = 2000
CANARY = ([5, 6], [[7], [8, 9]])  # query and items that every model has


class RequestRefused(Exception):
    """A request that must succeed did not; the message is the answer's."""


class Skipped(Exception):
    """A check that cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What is known of the served model when it is here as well."""

    directory: Path
    tokenizer: Tokenizer | None
    probabilities: Callable[[list[Ids], Ids], Float64Array]  # prompts, labels -> [N, labels]


@dataclass(frozen=True, slots=True)
class CheckedServer:
    """Facts, and requests. All token ids are random, from a generator with a seed."""

    client: PlainClient
    model: str
    vocab: int  # valid ids are below it
    vocab_known: bool
    query_len: int  # tokens of a long query that it takes together with items
    texts: bool  # whether it takes text
    tolerance: float
    rng: np.random.RandomState
    labels: Ids
    reference: Reference | None = None
    canary: Float64Array | None = None  # scores of CANARY at the very first

    def ids(self, length: int) -> Ids:
        found: Ids = self.rng.randint(0, self.vocab, length).tolist()
        return found

    def items(self, *lengths: int) -> list[Ids]:
        return [self.ids(length) for length in lengths]

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
        """Scores [N, labels], by default with softmax: they are of a size that shows errors.

        Raises:
            Refused: no answer of status 200 with as many finite numbers.
        """
        return self.scores(self.body(query, items, labels, **more))

    def scores(self, body: dict[str, Any]) -> Float64Array:
        """The scores of a request that must succeed; raises Refused as `ask`."""
        num_labels = len(body["label_token_ids"])
        return self.table(self.client.score(body), len(body["items"]), num_labels)

    def table(
        self, reply: ServerReply, num_items: int, num_labels: int | None = None
    ) -> Float64Array:
        """The scores of an answer, [num_items, num_labels]; None: as many labels as it has.

        Raises:
            Refused: the answer is not of status 200, or has no such table of finite numbers.
        """
        if reply.status != 200:
            raise RequestRefused(str(reply))
        try:
            found = np.array(reply.body["scores"], dtype=np.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise RequestRefused(f"no table of numbers in scores: {error!r}") from error
        if num_labels is None and found.ndim == 2:
            num_labels = found.shape[1]
        if found.shape != (num_items, num_labels) or num_labels == 0:
            wanted = num_labels or "at least 1"
            raise RequestRefused(
                f"scores is a table of {found.shape}, not of ({num_items}, {wanted})"
            )
        if not np.isfinite(found).all():
            raise RequestRefused("scores has numbers that are not finite")
        return found

    def at_once(self, bodies: Sequence[dict[str, Any]]) -> list[ServerReply]:
        """Answers of requests that are sent together."""
        with ThreadPoolExecutor(max_workers=len(bodies)) as threads:
            return list(threads.map(self.client.score, bodies))

    def differ(self, want: Float64Array, got: Float64Array) -> str | None:
        """How two tables differ beyond rounding, or None."""
        sizes = np.abs(want - got)
        if sizes.max() <= self.tolerance and sizes.mean() <= self.tolerance / 2:
            return None
        return (
            f"differ by up to {sizes.max():.1e}, mean {sizes.mean():.1e}; rounding is up to "
            f"{self.tolerance:g}, mean {self.tolerance / 2:g}"
        )


def meet(
    client: PlainClient, tolerance: float, vocab: int | None, reference: Reference | None, seed: int
) -> CheckedServer:
    """Find out what a server takes.

    Args:
        vocab: valid ids are below it; None: found by asking for labels, in some 30 requests.

    Raises:
        Refused: it does not even answer a plain request.
    """
    model = _model_name(client)
    rng = np.random.RandomState(seed)
    body = {"model": model, "query": [5, 6], "items": [[7]], "label_token_ids": [3]}
    reply = client.score(body)
    if reply.status != 200:
        raise RequestRefused(f"a plain request of token ids gets {reply}")
    found = vocab or _find_vocab(lambda id: client.score(body | {"label_token_ids": [id]}))
    rows = found or SAFE_VOCAB
    server = CheckedServer(
        client=client,
        model=model,
        vocab=rows,
        vocab_known=found is not None,
        query_len=_find_query_len(lambda n: client.score(body | {"query": [5] * n})),
        texts=client.score(body | {"query": "a ", "items": ["b"]}).status == 200,
        tolerance=tolerance,
        rng=rng,
        labels=[int(id) for id in rng.choice(rows, 3, replace=False)],
        reference=reference,
    )
    return replace(server, canary=server.ask(*CANARY))


def _model_name(client: PlainClient) -> str:
    """sgl-jax asks for the name; everyone has /v1/models."""
    body = client.get("/v1/models").body
    try:
        return str(body["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        return "default"


def _find_vocab(ask: Callable[[int], ServerReply]) -> int | None:
    """The first id that is refused as a label, by halves; None if none is."""
    if ask(LARGEST_VOCAB).status == 200:
        return None
    valid, refused = SAFE_VOCAB - 1, LARGEST_VOCAB
    while refused - valid > 1:
        middle = (valid + refused) // 2
        if ask(middle).status == 200:
            valid = middle
        else:
            refused = middle
    return refused


def _find_query_len(ask: Callable[[int], ServerReply]) -> int:
    """The largest of 2000, 1000, 500, ... that leaves room for items."""
    length = LONG_QUERY
    while length > 32 and ask(length + 2 * max(64, length // 8)).status != 200:
        length //= 2
    return length
