"""Requests of one shape with their expected answers, and the figures of a run of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from load import LOST, Record
from numpy.typing import NDArray

LABELS = [11, 23]
CHUNK = 500  # requests whose arrays and bytes are made at a time
REFUSED = 429
# Quantiles of latencies that are kept for plots.
QUANTILES = [*(i / 20 for i in range(19)), *(i / 100 for i in range(91, 100)), 0.995, 0.999, 1.0]

# (queries [R, Q], items [R, N, L], labels) -> probabilities [R, N, labels]
Oracle = Callable[[NDArray[np.int32], NDArray[np.int32], Sequence[int]], NDArray[np.float64]]


@dataclass(frozen=True)
class Shape:
    query: int  # tokens
    items: int
    item: int  # tokens of each

    def __str__(self) -> str:
        return f"{self.query} + {self.items} x {self.item}"

    @property
    def own_cached(self) -> int:
        """Prompt tokens that count as cached because the request's own items share the query."""
        return self.query * (self.items - 1)


@dataclass(frozen=True)
class Traffic:
    shape: Shape
    wires: list[bytes]  # whole HTTP requests
    expected: NDArray[np.float64]  # [R, N, labels]
    tolerance: float  # of log p; 0 = equal except for rounding of exp in float64


class Tokens(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens_details: Tokens


class Answer(msgspec.Struct):
    """The fields of an answer that are read."""

    scores: list[list[float]]
    usage: Usage


_decode = msgspec.json.Decoder(Answer).decode


def make(
    shape: Shape,
    count: int,
    vocab: int,
    oracle: Oracle,
    rng: np.random.Generator,
    *,
    tolerance: float = 0.0,
    pool: int = 0,
) -> Traffic:
    """Make `count` requests of random tokens; all items are different.

    Queries are all different too, or with `pool` chosen from that many.
    """
    known = rng.integers(0, vocab, (pool, shape.query), dtype=np.int32)
    wires: list[bytes] = []
    expected = []
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        if pool:
            queries = known[rng.integers(0, pool, size)]
        else:
            queries = rng.integers(0, vocab, (size, shape.query), dtype=np.int32)
        items = rng.integers(0, vocab, (size, shape.items, shape.item), dtype=np.int32)
        expected.append(oracle(queries, items, LABELS))
        wires += map(_wire, queries.tolist(), items.tolist())
    return Traffic(shape, wires, np.concatenate(expected), tolerance)


def _wire(query: list[int], items: list[list[int]]) -> bytes:
    body = msgspec.json.encode({"query": query, "items": items, "label_token_ids": LABELS})
    head = (
        "POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def check(traffic: Traffic, record: Record) -> tuple[NDArray[np.bool_], float]:
    """Return a mask of wrong answers among those with status 200, [R], and the cache's hit rate.

    The hit rate is cached tokens, without those that a request's own items share, over query
    tokens.
    """
    wrong = np.zeros(len(traffic.wires), dtype=bool)
    answered = np.flatnonzero(record.status == 200)
    cached = 0
    for request in answered.tolist():
        try:
            answer = _decode(record.bodies[request])
        except msgspec.MsgspecError:
            wrong[request] = True
            continue
        wrong[request] = not _agrees(answer.scores, traffic.expected[request], traffic.tolerance)
        own = traffic.shape.own_cached
        cached += max(0, answer.usage.prompt_tokens_details.cached_tokens - own)
    return wrong, cached / max(1, len(answered) * traffic.shape.query)


def _agrees(scores: list[list[float]], want: NDArray[np.float64], tolerance: float) -> bool:
    if [len(row) for row in scores] != [want.shape[1]] * want.shape[0]:
        return False
    got = np.array(scores)
    if not (np.isfinite(got).all() and (got > 0).all()):
        return False
    return bool(np.abs(np.log(got) - np.log(want)).max() <= max(tolerance, 1e-12))


def summary(traffic: Traffic, record: Record) -> dict[str, Any]:
    """Return a run's figures: rates and latencies of its measured part, counts of all of it."""
    wrong, hit_rate = check(traffic, record)
    status, tried, latency = record.status, record.tried, record.latency
    good = (status == 200) & ~wrong
    seconds = record.ended - record.began
    finished = good & (record.done > record.began) & (record.done <= record.ended)
    rate = finished.sum() / seconds if seconds > 0 else 0.0
    # In an open loop, requests that were due in time count, however late they were answered.
    due = (record.due >= record.began) & (record.due <= record.ended)
    counted = latency[good & due if record.open else finished]
    refused = status == REFUSED
    other = tried & ~np.isin(status, (LOST, 200, REFUSED)) & (status < 500)
    return {
        "requests": int(tried.sum()),
        "req/s": round(float(rate), 1),
        "in flight": round(float(rate * latency[finished].mean()), 1) if finished.any() else 0.0,
        **{f"p{q} ms": _percentile(counted, q) for q in (50, 90, 99)},
        "refused": int(refused.sum()),
        "refused p99 ms": _percentile(latency[refused], 99),
        "refused max ms": _percentile(latency[refused], 100),
        "5xx": int((status >= 500).sum()),
        "other": int(other.sum()),
        "lost": int((tried & (status == LOST)).sum()),
        "broken connections": record.broken,
        "wrong": int(wrong.sum()),
        "hit rate": round(hit_rate, 3),
        "sent late p99 ms": _percentile((record.sent - record.due)[tried], 99),
        "seconds": round(float(seconds), 2),
        "latencies ms": [_percentile(counted, 100 * q) for q in QUANTILES],
    }


def _percentile(seconds: NDArray[np.float64], percent: float) -> float | None:
    known = seconds[~np.isnan(seconds)]
    return round(float(np.percentile(known, percent)) * 1e3, 2) if len(known) else None


def poisson(rate: float, seconds: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw at least one arrival time of a Poisson process, in seconds from the start."""
    gaps = rng.exponential(1 / rate, size=max(1, round(rate * seconds)))
    return np.cumsum(gaps)
