"""The scenarios of `gpuscore bench`: experiments of published reports, with random tokens."""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gpuscore.measure.workload import TEXT, Ids, read_texts

SEQUENTIAL = 32  # items per request in the sequential mode, as in the TPU v6e report
LEAST_DIVIDED = 4  # if a request is divided, at least so many of its parts are sent
IN_FLIGHT = (128, 512, 1024)
MARK = 0  # the token after each candidate of a set, at which it is scored; occurs nowhere else


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A query and the items to score after it, all texts or all token ids.

    With `candidates` over 1, each item is a set; each of its candidates is scored at its MARK.
    """

    query: str | Ids
    items: Sequence[str | Ids]
    candidates: int = 1

    def chunks(self, size: int | None) -> "Iterator[BenchRequest]":
        """Yield requests of at most `size` items, each with the whole query; None: one request."""
        for start in range(0, len(self.items), size or len(self.items)):
            yield replace(self, items=self.items[start : start + (size or len(self.items))])


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens.

    Attributes:
        static: first tokens of the query, the same in all requests of a run.
        new: further tokens of the query, different in each request.
        items: number of items.
        item: tokens of each item.
    """

    static: int
    new: int
    items: int
    item: int

    def __str__(self) -> str:
        static = f"{self.static:,} static + " if self.static else ""
        return f"{static}{self.new:,} + {self.items:,} x {self.item}"


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to send the requests of a scenario.

    Attributes:
        shape: the lengths of each request, before it is divided.
        count: requests of one measurement.
        chunk: divide each request into requests of at most so many items; None: do not divide.
        in_flight: requests that are kept in flight.
        rate: arrivals per second of a Poisson process, instead of `in_flight`.
        seconds: how long to send requests.
        cold: the static tokens are different in each request, too.
        decodes: send to /v1/completions, which reads the prompts and decodes a token.
        candidates: number of candidates in each item; an item with several is a set.
        fraction: the fraction of the requests that is sent.
    """

    name: str
    shape: Shape
    count: int = 1
    chunk: int | None = None
    in_flight: int = 1
    rate: float | None = None
    seconds: float = 120.0
    cold: bool = False
    decodes: bool = False
    candidates: int = 1
    fraction: float = 1.0

    @property
    def requests(self) -> int:
        """Requests of a whole measurement, also those that are not sent."""
        if self.rate is not None:
            return max(1, round(self.rate * self.seconds))
        return self.count * math.ceil(self.shape.items / (self.chunk or self.shape.items))

    @property
    def sent(self) -> int:
        """Number of requests that a measurement sends; at least one second's arrivals."""
        least = LEAST_DIVIDED if self.chunk is not None else math.ceil(self.rate or 1)
        return max(min(least, self.requests), round(self.requests * self.fraction))


@dataclass(frozen=True, slots=True)
class Scenario:
    """A named experiment; `base` is the mode that the others are compared with."""

    name: str
    source: str
    modes: tuple[Mode, ...]
    base: str | None = None
    asks: tuple[BenchRequest, ...] = ()  # requests of --input; without them tokens are drawn

    @property
    def loads(self) -> bool:
        """True if requests per second and latencies are the result, not items per second."""
        return self.name in ("concurrency", "poisson", "latency")

    def scaled(self, scale: float) -> "Scenario":
        """Return the scenario with this fraction of its requests, each as long as before."""
        return replace(self, modes=tuple(replace(mode, fraction=scale) for mode in self.modes))


def _rerank(name: str, source: str, shape: Shape) -> Scenario:
    modes = (Mode("cold", shape, cold=True), Mode("warm", shape))
    return Scenario(name, source, modes, "cold")


_RERANK = Shape(100, 1900, 500, 20)
_ONE = Shape(0, 120, 1, 180)
_TEN = Shape(0, 120, 10, 180)
_GPU = "GPU report of 2026-02-12"
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "rerank",
            "TPU v6e report of 2026-02-10",
            (
                Mode("packed", _RERANK),
                Mode("sequential", _RERANK, chunk=SEQUENTIAL),
                Mode("single", _RERANK, chunk=1),
            ),
            "sequential",
        ),
        _rerank("rerank-static", f"{_GPU}, scenario 1", Shape(2000, 20, 500, 20)),
        _rerank("rerank-short", f"{_GPU}, scenario 2", Shape(1900, 10, 500, 10)),
        Scenario(
            "concurrency",
            "TPU v5e notes of 2026-01-27",
            tuple(
                Mode(f"{shape.items} x 180, {number:,} in flight", shape, 2000, in_flight=number)
                for shape in (_ONE, _TEN)
                for number in IN_FLIGHT
            ),
        ),
        Scenario("poisson", "report on decode", (Mode("Poisson 70/s", _TEN, rate=70.0),)),
        Scenario(
            "latency",
            "report on decode",
            (
                Mode("scoring", _ONE, count=20),
                Mode("prefill plus decode", _ONE, count=20, decodes=True),
            ),
            "prefill plus decode",
        ),
        Scenario(
            "setwise",
            "100 sets of 10 candidates",
            (
                Mode("sets", Shape(2000, 0, 100, 210), candidates=10),
                Mode("single", Shape(2000, 0, 1000, 21), chunk=1),
            ),
            "single",
        ),
        # `text_scenario` adds the modes.
        Scenario(TEXT, "real sentences, or --input", modes=(), base="sequential"),
    )
}


def poisson_at(rate: float, seconds: float = 120.0) -> Mode:
    """Return the mode of the scenario `poisson` at another rate."""
    return Mode(f"Poisson {rate:g}/s", _TEN, rate=rate, seconds=seconds)


def text_scenario(path: Path) -> Scenario:
    """Read a file of JSON lines with `query` and `items`; raise UsageError with the line's number.

    One measurement sends the requests of all lines, in order.
    """
    asks = [BenchRequest(line.query, line.items) for line in read_texts(path, "--input")]
    shape = Shape(0, 0, max(len(ask.items) for ask in asks), 0)
    modes = [Mode("packed", shape, len(asks))]
    if shape.items > SEQUENTIAL:
        modes.append(Mode("sequential", shape, len(asks), chunk=SEQUENTIAL))
    return replace(SCENARIOS[TEXT], source=path.name, modes=tuple(modes), asks=tuple(asks))


class Draws:
    """Draws random requests: equal for all servers, different in each measurement.

    Args:
        vocab: token ids are below it.
    """

    def __init__(self, seed: int, vocab: int) -> None:
        self._seed = seed
        self._vocab = vocab

    def requests(self, scenario: Scenario, mode: Mode, number: int) -> list[BenchRequest]:
        """Return the requests of measurement `number` of a mode, already divided."""
        every = scenario.asks
        if not every:
            rng = self._rng(scenario.name, mode.name, number)
            static = self._ids(self._rng(scenario.name), mode.shape.static)
            total = mode.sent if mode.rate is not None else mode.count
            every = tuple(self._draw(rng, mode, static) for _ in range(total))
        divided = [part for ask in every for part in ask.chunks(mode.chunk)]
        return divided[: mode.sent]

    def arrivals(self, mode: Mode, number: int) -> np.ndarray:
        """Return the times at which requests are due, in seconds from the start."""
        assert mode.rate is not None  # noqa: S101  (callers check it)
        rng = self._rng("arrivals", mode.name, number)
        return np.cumsum(rng.exponential(1 / mode.rate, size=mode.requests))

    def _draw(self, rng: np.random.Generator, mode: Mode, static: Ids) -> BenchRequest:
        shape = mode.shape
        first = self._ids(rng, shape.static) if mode.cold else static
        query = [*first, *self._ids(rng, shape.new)]
        items = [self._ids(rng, shape.item) for _ in range(shape.items)]
        each = shape.item // mode.candidates
        for item in items if mode.candidates > 1 else ():
            item[each - 1 :: each] = [MARK] * mode.candidates
        return BenchRequest(query, items, mode.candidates)

    def _ids(self, rng: np.random.Generator, length: int) -> Ids:
        ids: Ids = rng.integers(MARK + 1, self._vocab, length).tolist()
        return ids

    def _rng(self, *names: str | int) -> np.random.Generator:
        keys = [zlib.crc32(name.encode()) if isinstance(name, str) else name for name in names]
        return np.random.default_rng([self._seed, *keys])
