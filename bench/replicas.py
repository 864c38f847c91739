"""Routing over many replicas, in simulated time: who finds its prefix, and when the last one ends.

    make bench-replicas                       # 8 and 64 replicas; minutes
    make bench-replicas ARGS='--replicas 8 --requests 4000'

Every replica is the engine's own core (scheduler, pages, prefix cache) over a device that takes a
fixed time per batch and per token; in front is the server's own routing. Nothing is measured but
decisions, so the figures do not depend on this machine. `affinity` sends single items at 70 % load
and counts the requests whose query was seen before and whose full pages were all found. `makespan`
sends skewed work at once and compares its end with that of a perfect division, which computes every
query once.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from report import keep, table
from simulated_engine import BATCH_SECONDS, LIMITS, TOKEN_SECONDS, Clock, Engine

from gpuscore.config import EngineConfig
from gpuscore.errors import GpuscoreError
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.types.request import ScoreRequest, ScoreResult

LABELS = np.array([1, 2], np.int32)
LOAD = 0.7
IN_FLIGHT = 128  # requests per replica, of work that is sent at once


@dataclass
class World:
    """Replicas behind the server's routing, and what has been answered."""

    replicas: int
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.engines = [Engine(self.clock) for _ in range(self.replicas)]
        config = EngineConfig(
            max_queued_requests=10**9, max_queued_tokens=10**12, max_queued_items=10**9
        )
        self.front = Replicas(self.engines, [""] * self.replicas, config)
        self.computed = 0
        self.answered = 0

    def send(self, request: ScoreRequest, done: Callable[[ScoreResult], None]) -> None:
        (outcome,) = self.front.score_all([request])
        if isinstance(outcome, GpuscoreError):
            raise outcome

        def answered(future: "Future[ScoreResult]") -> None:
            result = future.result()
            self.computed += result.computed_tokens
            self.answered += 1
            done(result)

        outcome.add_done_callback(answered)

    @property
    def load(self) -> float:
        return sum(engine.device.busy for engine in self.engines) / self.clock.now / self.replicas


def affinity(replicas: int, requests: int, rng: np.random.Generator) -> dict[str, object]:
    """Single items at 70 % load; queries of Zipf's popularity, all lengths."""
    queries = [_tokens(rng, int(n)) for n in rng.lognormal(6, 0.8, requests // 8).clip(32, 8000)]
    popularity = 1 / np.arange(1, len(queries) + 1) ** 0.8
    popularity /= popularity.sum()
    rate = replicas / (600 * TOKEN_SECONDS)
    for _ in range(4):  # the rate that gives this load depends on the hits
        world, hits, seen = World(replicas), list[bool](), set[int]()
        chosen = rng.choice(len(queries), requests, p=popularity)
        arrivals = np.cumsum(rng.exponential(1 / rate, requests))
        for query, time in zip(chosen.tolist(), arrivals.tolist(), strict=True):
            request = _request(queries[query], [_tokens(rng, int(rng.integers(20, 400)))])
            world.clock.at(time, partial(_arrive, world, request, seen, hits))
        world.clock.run()
        load = world.load
        if abs(load - LOAD) < 0.02:
            break
        rate *= LOAD / load
    return {
        "workload": "affinity",
        "replicas": replicas,
        "requests": requests,
        "load": f"{load:.0%}",
        "result": f"{np.mean(hits):.1%} found all pages",
    }


def _arrive(world: World, request: ScoreRequest, seen: set[int], hits: list[bool]) -> None:
    """Send a request, and note whether a query that was seen before was found whole."""
    query = id(request.query_ids)
    known = query in seen
    full = len(request.query_ids) // LIMITS.page_size * LIMITS.page_size

    def done(result: ScoreResult) -> None:
        seen.add(query)
        if known:
            hits.append(result.computed_tokens == request.num_tokens - full)

    world.send(request, done)


def makespan(
    name: str, replicas: int, work: Sequence[ScoreRequest], in_flight: int
) -> dict[str, object]:
    """Work that is sent at once, some of it waiting outside for room."""
    world, waiting = World(replicas), iter(work)

    def send_next(_: ScoreResult | None = None) -> None:
        for request in waiting:
            # In a new event, so that answers of one step do not nest.
            world.clock.at(world.clock.now, partial(world.send, request, send_next))
            return

    for _ in range(in_flight):
        send_next()
    world.clock.run()
    if world.answered != len(work):
        raise RuntimeError(f"{world.answered} of {len(work)} requests were answered")
    distinct = {id(request.query_ids): len(request.query_ids) for request in work}
    least = sum(distinct.values()) + sum(r.num_tokens - len(r.query_ids) for r in work)
    batches = least / LIMITS.max_tokens
    ideal = (least * TOKEN_SECONDS + batches * BATCH_SECONDS) / replicas
    return {
        "workload": name,
        "replicas": replicas,
        "requests": len(work),
        "load": f"{world.load:.0%}",
        "result": f"{world.clock.now / ideal:.2f} of the ideal time",
    }


def skewed(
    replicas: int, requests: int, rng: np.random.Generator
) -> Iterator[tuple[str, list[ScoreRequest]]]:
    """Yield kinds of skewed work, each with its requests."""
    hot = _tokens(rng, 2000)
    others = [_tokens(rng, 500) for _ in range(requests // 10)]
    yield (
        "one query has half of the requests",
        [
            _request(
                hot if rng.random() < 0.5 else others[int(rng.integers(len(others)))],
                [_tokens(rng, int(n)) for n in rng.integers(10, 200, 20)],
            )
            for _ in range(requests)
        ],
    )
    sizes = rng.lognormal(3, 1.5, requests).clip(1, 10_000).astype(int)
    yield (
        "items per request: log-normal, up to 10,000",
        [_request(_tokens(rng, int(rng.integers(50, 2000))), _items(rng, int(n))) for n in sizes],
    )
    yield (
        "one request of 20,000 items per 4 replicas, last",
        [
            *(_request(_tokens(rng, 500), _items(rng, 20)) for _ in range(requests // 8)),
            *(
                _request(_tokens(rng, 2000), _items(rng, 20_000))
                for _ in range(max(1, replicas // 4))
            ),
        ],
    )


def _items(rng: np.random.Generator, number: int) -> list[np.ndarray]:
    return [_tokens(rng, int(n)) for n in rng.integers(10, 60, number)]


def _request(query: np.ndarray, items: Sequence[np.ndarray]) -> ScoreRequest:
    return ScoreRequest(query, tuple(items), (LABELS,) * len(items), need_lse=True)


def _tokens(rng: np.random.Generator, number: int) -> np.ndarray:
    return rng.integers(0, LIMITS.vocab_rows, number).astype(np.int32)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--requests", type=int, default=400, help="requests per replica")
    options = parser.parse_args()
    rows = []
    for replicas in options.replicas:
        rng = np.random.default_rng(0)
        number = replicas * options.requests
        rows.append(affinity(replicas, number, rng))
        print(rows[-1], flush=True)
        for name, work in skewed(replicas, number, rng):
            rows.append(makespan(name, replicas, work, IN_FLIGHT * replicas))
            print(rows[-1], flush=True)
    print(f"\n{table(rows)}\n")
    keep("replicas", {"bench": "replicas", "options": vars(options), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
