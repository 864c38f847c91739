"""The goals over HTTP: a server of our own under the load generator of bench/serve.py.

Needs the server's dependencies (FastAPI, uvicorn, httptools, msgspec, prometheus_client).
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gpu_work import score_request
from launch import real_server, serving
from load import ClosedLoop, OpenLoop
from traffic import QUANTILES, Shape, Traffic, make, poisson, summary

from gpuscore.backends.base import Backend
from gpuscore.config import EngineConfig
from gpuscore.engine.engine import Engine
from gpuscore.types.labels import label_logprobs

NEEDS = ("fastapi", "httptools", "msgspec", "prometheus_client", "uvicorn")
PROMPT = Shape(280, 1, 20)
CANDIDATES = Shape(300, 16, 32)
REPORT = Shape(120, 10, 180)
HELD_MS = 500.0  # the largest p99 of a rate that counts as held
NEEDED = 240.0  # requests/s of REPORT: twice 1,200 items/s


@dataclass(frozen=True)
class Sizes:
    prompts: int = 200  # sent one after the other
    rate: float = 60.0  # of CANDIDATES, per second
    seconds: float = 8.0  # of an open loop, after ...
    warmup: float = 2.0  # ... these
    rates: tuple[float, ...] = (120.0, 180.0, 240.0, 300.0, 360.0, 420.0)  # of REPORT, ascending
    halvings: int = 2  # further rates between the last held one and the first that was not


QUICK = Sizes(5, 4.0, 1.0, 0.2, (2.0, 4.0), 1)


@dataclass
class Http:
    """A server under load, and an engine in this process that computes the expected answers."""

    address: tuple[str, int]
    engine: Engine
    vocab: int
    tolerance: float
    sizes: Sizes
    rng: np.random.Generator

    def rows(self) -> Iterator[dict[str, Any]]:
        traffic = self._traffic(PROMPT, self.sizes.prompts + 2)
        loop = ClosedLoop(self.address, traffic.wires, 60.0, clients=1)
        found = summary(traffic, loop.execute())
        yield _row("HTTP, one at a time", PROMPT, found, "p50 ms", 3.0)
        found = self._poisson(CANDIDATES, self.sizes.rate)
        found["p95 ms"] = found["latencies ms"][QUANTILES.index(0.95)]
        yield _row(f"HTTP, Poisson {self.sizes.rate:g}/s", CANDIDATES, found, "p95 ms", 6.0)
        yield from self._highest()

    def _highest(self) -> Iterator[dict[str, Any]]:
        """Raise the rate until p99 exceeds HELD_MS, then halve the interval a few times."""
        held = lost = 0.0
        for rate in self.sizes.rates:
            row = self._at(rate)
            yield row
            if not row["held"]:
                lost = rate
                break
            held = rate
        for _ in range(self.sizes.halvings if lost else 0):
            row = self._at((held + lost) / 2)
            yield row
            held, lost = (row["offered"], lost) if row["held"] else (held, row["offered"])
        yield {
            "scorer": f"HTTP, highest Poisson rate with p99 <= {HELD_MS:.0f} ms",
            "sizes": str(REPORT),
            "requests/s": held,
            "items/s": held * REPORT.items,
            "goal": f">= {NEEDED * REPORT.items:.0f} items/s",
            "met": held >= NEEDED,
        }

    def _at(self, rate: float) -> dict[str, Any]:
        found = self._poisson(REPORT, rate)
        row = _row(f"HTTP, Poisson {rate:g}/s", REPORT, found, "p99 ms", None)
        answered = not found["refused"] and found["p99 ms"] is not None
        held = answered and found["p99 ms"] <= HELD_MS and "wrong" not in row
        return row | {"offered": rate, "held": held}

    def _poisson(self, shape: Shape, rate: float) -> dict[str, Any]:
        offsets = poisson(rate, self.sizes.seconds + self.sizes.warmup, self.rng)
        traffic = self._traffic(shape, len(offsets))
        return summary(
            traffic, OpenLoop(self.address, traffic.wires, offsets, self.sizes.warmup).execute()
        )

    def _traffic(self, shape: Shape, count: int) -> Traffic:
        return make(shape, count, self.vocab, self._oracle, self.rng, tolerance=self.tolerance)

    def _oracle(self, queries: np.ndarray, items: np.ndarray, labels: object) -> np.ndarray:
        requests = [score_request(q, i) for q, i in zip(queries, items, strict=True)]
        futures = [self.engine.score(request) for request in requests]
        return np.exp([np.stack(label_logprobs(future.result())) for future in futures])


def measure(
    backend: Backend,
    options: dict[str, Any],
    directory: Any,
    tolerance: float,
    quick: bool,
    add: Callable[[dict[str, Any]], None],
) -> None:
    """Measure and add the rows; ends the engine that it makes around `backend`.

    Raises:
        ImportError: a dependency of the server is not installed.
    """
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise ImportError(f"not installed here: {', '.join(missing)}")
    chosen = {name: value for name, value in options.items() if value is not None}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
    flags += ["--max-inflight-per-key=4096", "--max-queued-requests=2048", "--no-log-requests"]
    engine = Engine(backend, EngineConfig(max_queued_requests=1 << 20))
    try:
        with serving(real_server(directory, *flags)) as target:
            http = Http(
                target.address,
                engine,
                backend.limits.vocab_rows,
                tolerance,
                QUICK if quick else Sizes(),
                np.random.default_rng(),
            )
            for row in http.rows():
                add(row)
    finally:
        engine.close()


def _row(
    name: str, shape: Shape, found: dict[str, Any], shown: str, goal: float | None
) -> dict[str, Any]:
    """Return the row of one run; with a wrong, lost or failed answer it has no time."""
    row = {"scorer": name, "sizes": str(shape), "summary": found}
    bad = {key: found[key] for key in ("wrong", "lost", "5xx", "other") if found[key]}
    if bad:
        return row | {"wrong": True, "errors": f"answers: {bad}"}
    row |= {"wall ms": found[shown], "clock": shown, "items/s": found["req/s"] * shape.items}
    if goal is not None:
        met = found[shown] is not None and found[shown] <= goal
        row |= {"goal": f"{shown} <= {goal:g}", "met": bool(met)}
    return row
