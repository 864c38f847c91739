"""The scoring APIs of three kinds of servers: how to build a request and how to read an answer."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import msgspec

from gpuscore.measure.scenarios import MARK, BenchRequest
from gpuscore.measure.workload import Ids

LABELS = [11, 23]  # the label token ids of timed requests
Rows = list[list[float]]
EVERY = "every label"
FIRST = "the first label"
BEST = "the best token"


@dataclass(frozen=True, slots=True)
class Api:
    """One API.

    Attributes:
        name: the value of --api.
        gives: which probabilities it returns: of EVERY label, of the FIRST one, or of the BEST
            token, whatever the labels are.
        body: builds the body from a request, the model's name and the label ids.
        rows: reads an answer's scores, a row for each item.
    """

    name: str
    path: str
    gives: str
    body: Callable[[BenchRequest, str, Ids], dict[str, Any]]
    rows: Callable[[Any], Any]

    def encode(self, ask: BenchRequest, model: str, labels: Ids = LABELS) -> bytes:
        return msgspec.json.encode(self.body(ask, model, labels))

    def read(self, body: bytes, ask: BenchRequest) -> Rows:
        """Return a row per item or candidate; raise ValueError for a malformed answer."""
        count = len(ask.items) * ask.candidates
        try:
            found = self.rows(msgspec.json.decode(body))
            rows: Rows = found if ask.candidates == 1 else [*chain.from_iterable(found)]
            if len(rows) == count and all(map(math.isfinite, chain.from_iterable(rows))):
                return rows
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"no scores in an answer: {error!r}") from error
        raise ValueError(f"{len(rows)} rows of scores, or some not finite, for {count} items")


def _score_body(ask: BenchRequest, model: str, labels: Ids) -> dict[str, Any]:
    body = {"model": model, "query": ask.query, "items": ask.items, "label_token_ids": labels}
    return body if ask.candidates == 1 else body | {"score_extraction_token_id": MARK}


def _ordered(entries: Any) -> list[Any]:
    return sorted(entries, key=lambda entry: int(entry["index"]))


def _completions_body(ask: BenchRequest, model: str, labels: Ids) -> dict[str, Any]:
    head: Any = ask.query if isinstance(ask.query, str) else [*ask.query]
    prompts = [head + item for item in ask.items]
    return {"model": model, "prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1}


def _completions_rows(answer: Any) -> Rows:
    """Return the probability of the most probable next token of each prompt."""
    logs = [choice["logprobs"]["token_logprobs"] for choice in _ordered(answer["choices"])]
    return [[math.exp(log[-1])] for log in logs]


APIS = {
    api.name: api
    for api in (
        Api("score", "/v1/score", EVERY, _score_body, rows=itemgetter("scores")),
        Api(
            *("generative", "/generative_scoring", FIRST),
            body=lambda *request: (
                _score_body(*request) | {"apply_softmax": False, "add_special_tokens": False}
            ),
            rows=lambda answer: [[float(entry["score"])] for entry in _ordered(answer["data"])],
        ),
        Api("completions", "/v1/completions", BEST, _completions_body, rows=_completions_rows),
    )
}
