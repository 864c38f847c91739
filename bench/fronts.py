"""A simulation of HTTP workers and engines: the small requests per second that several answer.

    make simulate-fronts ARGS='--http-us 1700 --engine-us 550'

takes the CPU time per request that `make bench-serve` shows (`http us`, and `server us` less that)
and predicts closed loops for other numbers of workers and engines, each on a core of its own. A
worker and an engine do one thing at a time. The kernel gives a connection to a worker at random and
for good; a request goes to the engine with the fewest requests. Devices take no time: the figures
are bounds of the host side. Times of service are exponential. Rows show medians over seeds, with
the least and the most. Predictions, not measurements: with fewer cores than processes, or where
memory or the kernel is the limit, the figures are lower.
"""

import argparse
import heapq
import random
import statistics
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from report import table

BEFORE = 0.6  # share of a worker's time that a request takes before it goes to the engine
WARMUP = 0.2  # share of the answers that do not count


@dataclass
class Station:
    """A process that serves one thing at a time, in order of arrival."""

    mean: float  # seconds of service, both visits of a request together
    waiting: "deque[tuple[int, int]]" = field(default_factory=deque)  # request and its stage
    busy: float = 0.0  # seconds of service so far
    present: int = 0  # requests that wait or are served


class World:
    """A closed loop of connections, each of which sends its next request after an answer.

    Args:
        workers, engines: numbers of processes.
        connections: requests in flight.
        http, engine: seconds of CPU time per request.
        rng: makes the world's choices.
    """

    def __init__(
        self,
        workers: int,
        engines: int,
        connections: int,
        http: float,
        engine: float,
        rng: random.Random,
    ) -> None:
        self._rng = rng
        self.workers = [Station(http) for _ in range(workers)]
        self.engines = [Station(engine) for _ in range(engines)]
        self._home = [rng.choice(self.workers) for _ in range(connections)]
        self._engine_of = self.engines[:1] * connections
        self._events: list[
            tuple[float, int, int, int]
        ] = []  # end of service, order, request, stage
        self._order = 0
        self.now = 0.0
        for connection in range(connections):
            self._arrive(connection, 0)

    @property
    def stations(self) -> "tuple[list[Station], list[Station]]":
        return self.workers, self.engines

    def run(self, answers: int) -> float:
        """Return the answers per second of the last part of so many answers."""
        skipped, began, done = int(answers * WARMUP), 0.0, 0
        while done < answers:
            self.now, _, connection, stage = heapq.heappop(self._events)
            self._leave(connection, stage)
            if stage < 2:
                self._arrive(connection, stage + 1)
                continue
            done += 1
            if done == skipped:
                began = self.now
            self._arrive(connection, 0)
        return (answers - skipped) / (self.now - began)

    def _station(self, connection: int, stage: int) -> Station:
        return self._engine_of[connection] if stage == 1 else self._home[connection]

    def _arrive(self, connection: int, stage: int) -> None:
        if stage == 1:
            self._engine_of[connection] = min(self.engines, key=lambda one: one.present)
        station = self._station(connection, stage)
        station.waiting.append((connection, stage))
        station.present += 1
        if station.present == 1:
            self._serve(station)

    def _serve(self, station: Station) -> None:
        connection, stage = station.waiting[0]
        share = (BEFORE, 1.0, 1.0 - BEFORE)[stage]
        seconds = self._rng.expovariate(1.0) * station.mean * share
        station.busy += seconds
        self._order += 1
        heapq.heappush(self._events, (self.now + seconds, self._order, connection, stage))

    def _leave(self, connection: int, stage: int) -> None:
        station = self._station(connection, stage)
        station.waiting.popleft()
        station.present -= 1
        if station.present:
            self._serve(station)


def rows(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    for engines in options.engines:
        for workers in options.workers:
            rates, busy = [], []
            for seed in range(options.seeds):
                world = World(
                    workers,
                    engines,
                    options.connections,
                    options.http_us * 1e-6,
                    options.engine_us * 1e-6,
                    random.Random(seed),
                )
                rates.append(world.run(options.answers))
                busy.append(
                    [statistics.mean(s.busy for s in part) / world.now for part in world.stations]
                )
            yield {
                "engines": engines,
                "HTTP workers": workers,
                "requests/s": round(statistics.median(rates)),
                "least": round(min(rates)),
                "most": round(max(rates)),
                "workers busy": f"{statistics.median(one[0] for one in busy):.0%}",
                "engines busy": f"{statistics.median(one[1] for one in busy):.0%}",
            }


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--http-us", type=float, required=True, help="of CPU time per request")
    parser.add_argument("--engine-us", type=float, required=True, help="of CPU time per request")
    parser.add_argument("--workers", type=numbers, default=[1, 2, 4, 8, 16], metavar="N,N")
    parser.add_argument("--engines", type=numbers, default=[1, 8], metavar="N,N")
    parser.add_argument("--connections", type=int, default=512)
    parser.add_argument("--answers", type=int, default=20_000, help="of a world")
    parser.add_argument("--seeds", type=int, default=7)
    print(table(list(rows(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
