"""The APIs that score, of five makes of servers: bodies of requests, and scores of answers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gpuscore.measure.bench.scenarios import BenchRequest, Ids

LABELS = [11, 23]  # token ids whose probability is asked for while the clock runs
Rows = list[list[float]]
LABELS_ASKED_FOR, BEST, OWN_PROMPTS = "labels", "best token", "own prompts"


@dataclass(frozen=True, slots=True)
class Api:
    """One API.

    Attributes:
        name: as --api takes it.
        path: of the route.
        takes_ids: requests may hold token ids.
        kind: LABELS_ASKED_FOR: probabilities of labels; BEST: the most probable token's
            probability; OWN_PROMPTS: scores of prompts that only this server makes.
        first_label_only: it gives one score per item; if labels are asked for, the first label's.
        body: makes a request of a model's name and label ids.
        rows: reads an answer's scores, a row for each item, given their number.
    """

    name: str
    path: str
    takes_ids: bool
    kind: str
    first_label_only: bool
    body: Callable[[BenchRequest, str, Ids], dict[str, Any]]
    rows: Callable[[Any, int], Rows]

    def encode(self, ask: BenchRequest, model: str, labels: Ids = LABELS) -> bytes:
        return msgspec.json.encode(self.body(ask, model, labels))

    def read(self, body: bytes, items: int) -> Rows:
        """Return a row per item; raise ValueError, KeyError or TypeError for a malformed answer."""
        rows = self.rows(msgspec.json.decode(body), items)
        if len(rows) != items or not all(math.isfinite(score) for row in rows for score in row):
            raise ValueError(f"{len(rows)} rows of scores, or some not finite, for {items} items")
        return rows


def _score_body(ask: BenchRequest, model: str, labels: Ids) -> dict[str, Any]:
    return {"model": model, "query": ask.query, "items": ask.items, "label_token_ids": labels}


def _completions_body(ask: BenchRequest, model: str, labels: Ids) -> dict[str, Any]:
    prompts = [_joined(ask.query, item) for item in ask.items]
    return {"model": model, "prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1}


def _joined(query: Any, item: Any) -> Any:
    return query + item if isinstance(query, str) else [*query, *item]


def _completions_rows(answer: Any, items: int) -> Rows:
    """Return the probability of the most probable next token of each prompt."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    return [[math.exp(choice["logprobs"]["token_logprobs"][-1])] for choice in choices]


def _ranked(entries: Sequence[Any], items: int, key: str) -> Rows:
    rows: Rows = [[math.nan] for _ in range(items)]
    for entry in entries:
        rows[entry["index"]] = [float(entry[key])]
    return rows


def _generative_body(ask: BenchRequest, model: str, labels: Ids) -> dict[str, Any]:
    whole = {"apply_softmax": False, "add_special_tokens": False}
    return _score_body(ask, model, labels) | whole


APIS = {
    api.name: api
    for api in (
        Api(
            *("score", "/v1/score", True, LABELS_ASKED_FOR, False),
            _score_body,
            lambda answer, items: list(answer["scores"]),
        ),
        Api(
            *("generative", "/generative_scoring", True, LABELS_ASKED_FOR, True),
            _generative_body,
            lambda answer, items: _ranked(answer["data"], items, "score"),
        ),
        Api(
            *("completions", "/v1/completions", True, BEST, True),
            _completions_body,
            _completions_rows,
        ),
        Api(
            *("rerank", "/rerank", False, OWN_PROMPTS, True),
            lambda ask, model, _: {"model": model, "query": ask.query, "documents": ask.items},
            lambda answer, items: _ranked(answer["results"], items, "relevance_score"),
        ),
        Api(
            *("tei", "/rerank", False, OWN_PROMPTS, True),
            lambda ask, model, _: {"query": ask.query, "texts": ask.items},
            lambda answer, items: _ranked(answer, items, "score"),
        ),
        Api(
            *("pairs", "/v1/score", False, OWN_PROMPTS, True),
            lambda ask, model, _: {"model": model, "text_1": ask.query, "text_2": ask.items},
            lambda answer, items: _ranked(answer["data"], items, "score"),
        ),
    )
}
_COMMON = """\
a all and are as at back be big black blue book box by can car chair city cold day do door end for
from full garden go good great green had hand have he her here high him his home house how in is it
its lamp large life light like line long look made make man many may more most my name new night no
not now of off old on one open or other our out over part place red right room said same see she
side small so some state steel story table than that the their them then there they thing this time
to two under up use very was water way we well were what when which white who will with wood word
work world year yes you"""
# Words that most vocabularies have as one token each, with the space before them.
WORDS = tuple(f" {word}" for word in _COMMON.split())
