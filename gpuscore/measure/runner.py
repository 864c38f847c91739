"""Runs of scenarios: repeats in turn, over all servers and ways, as long as there is time."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gpuscore.measure.apis import APIS, Api
from gpuscore.measure.figures import Row, Shot, WayFigures, failed
from gpuscore.measure.sample import Sampled, disagreement, in_common, take, trouble
from gpuscore.measure.scenarios import BenchRequest, Draws, Scenario, Way, poisson_at
from gpuscore.measure.targets import SAFE_VOCAB, HttpTarget
from gpuscore.measure.workload import sample

MOST_ROUNDS = 30
PROBED = 64  # requests in flight while a server's capacity is measured
STEPS = 5  # of the search for the highest rate, after it was doubled
SEARCH_SECONDS = 20.0
FEWEST_ARRIVALS = 50  # of each rate that is tried


class BenchRun:
    """Samples and times targets; `rows` has what was measured so far.

    Args:
        targets: in the order of the tables.
        scenarios: to run.
        options: of the command line.
        say: called with a line for people.
    """

    def __init__(
        self,
        targets: Sequence[HttpTarget],
        scenarios: Sequence[Scenario],
        options: argparse.Namespace,
        say: Callable[[str], None],
    ) -> None:
        self.targets, self.options, self._say = targets, options, say
        self.scenarios = [scenario.scaled(options.scale) for scenario in scenarios]
        self.samples: dict[str, Sampled] = {}
        self._figures: dict[tuple[str, str, str], WayFigures] = {}
        self._ways: dict[tuple[str, str], tuple[Way, ...]] = {}
        self._vocab = min(target.about.vocab or SAFE_VOCAB for target in targets)
        self._draws = Draws(options.bench_seed, self._vocab)

    def run(self) -> None:
        """Sample all targets, compare them, and time every scenario."""
        for target in self.targets:
            self._sample(target)
        each = self.options.minutes * 60 / max(1, len(self.scenarios))
        for scenario in self.scenarios:
            self._time(scenario, each)

    def rows(self) -> list[Row]:
        rows = []
        for scenario in self.scenarios:
            for target in self.targets:
                key = scenario.name, target.about.name
                base = self._figures.get((*key, scenario.base or ""))
                for way in self._ways.get(key, ()):
                    row = _empty(scenario, way, target)
                    rows.append(self._figures[*key, way.name].row(row, base, scenario.base))
        return rows

    def _sample(self, target: HttpTarget) -> None:
        """Score the sample; a target that disagrees with an earlier one is marked as wrong."""
        name, sampled = target.about.name, take(target, sample(self._vocab))
        for other in self.samples.values():
            first = other.scored
            if first.run is None or sampled.scored.run is None or "packed" in other.wrong:
                continue
            both = in_common(first, sampled.scored)
            if isinstance(both, str):
                self._say(f"{name} is not compared with {first.about.name}: {both}")
                continue
            why = disagreement(*both)
            said = "agrees with" if why is None else "DIFFERS from"
            self._say(f"{name} {said} {first.about.name}{'' if why is None else f': {why}'}")
            if why is not None:
                wrong = {"packed": f"not the scores of {first.about.name}: {why}"}
                sampled = replace(sampled, wrong={**sampled.wrong, **wrong})
        for way, why in sampled.wrong.items():
            self._say(f"{name}, {way}: {why}")
        self.samples[name] = sampled

    def _time(self, scenario: Scenario, seconds: float) -> None:
        """Measure all ways of all targets in turn, until the time is used."""
        began = time.monotonic()
        for target in self.targets:
            key = scenario.name, target.about.name
            wrong: Mapping[str, str] = self.samples[target.about.name].wrong
            why = wrong.get("packed")  # then no way has right scores
            self._ways[key] = scenario.ways
            try:
                if why is None:
                    self._ways[key] = self._ways_of(scenario, target)
            except ValueError as error:
                why = str(error)
            for way in self._ways[key]:
                figures = WayFigures(error=why or wrong.get(way.name))
                self._figures.setdefault((*key, way.name), figures)
        for number in range(MOST_ROUNDS):
            turn = time.monotonic()
            self._round(scenario, number)
            now = time.monotonic()
            if not number:
                self._say(f"{scenario.name}: a round takes {now - turn:.1f} s")
            if now + (now - turn) - began > seconds or scenario.loads and number >= 4:
                break

    def _round(self, scenario: Scenario, number: int) -> None:
        for target in self.targets:
            for way in self._ways[scenario.name, target.about.name]:
                measured = self._figures[scenario.name, target.about.name, way.name]
                if measured.error is not None or measured.done:
                    continue
                try:
                    if not number:
                        self._warm(scenario, way, target)
                    measured.shots.append(self._shot(scenario, way, target, number))
                except ValueError as error:
                    measured.error = str(error)

    def _warm(self, scenario: Scenario, way: Way, target: HttpTarget) -> None:
        """Send one request of the way's length, untimed, so that programs are compiled and static
        tokens cached; its failure is ignored, because the measurement will show it."""
        (first, *_) = self._draws.requests(scenario, way, MOST_ROUNDS)
        target.send(_api(way, target), [first])

    def _shot(self, scenario: Scenario, way: Way, target: HttpTarget, number: int) -> Shot:
        """Measure a way once; raise ValueError with the reason if an answer has no scores."""
        api, asks = _api(way, target), self._draws.requests(scenario, way, number)
        due = None if way.rate is None else self._draws.arrivals(way, number)[: len(asks)]
        record = target.send(api, asks, way.in_flight if due is None else due)
        if (bad := failed(record)) is not None:
            count = int((~np.isin(record.status, (200, 429))).sum())
            raise ValueError(f"{count} of {len(asks)} requests failed: {trouble(record, bad)}")
        for place in np.flatnonzero(record.status == 200).tolist():
            api.read(record.bodies[place], len(asks[place].items))
        shot = Shot.of(record, [len(ask.items) for ask in asks])
        if not shot.requests:
            raise ValueError(f"all {len(asks)} requests were refused: {trouble(record, 0)}")
        if _is_part(scenario, way, asks) and shot.requests == len(asks):
            return shot.extrapolated(len(asks[0].items), way.shape.items)
        return shot

    def _ways_of(self, scenario: Scenario, target: HttpTarget) -> tuple[Way, ...]:
        """Return the ways to measure; rates of the scenario poisson depend on the server."""
        options = self.options
        if scenario.name != "poisson":
            return scenario.ways
        if options.find_rate is not None:
            return self._search(scenario, target, options.find_rate)
        (way,) = scenario.ways
        rate = way.rate if options.rate is None else float(options.rate.removesuffix("%"))
        assert rate is not None  # noqa: S101  (the scenario's)
        if options.rate is not None and options.rate.endswith("%"):
            rate = round(self._capacity(scenario, target) * rate / 100, 2)
        if options.seconds is None:
            return (replace(poisson_at(rate), share=options.scale),)
        return (poisson_at(rate, options.seconds),)

    def _capacity(self, scenario: Scenario, target: HttpTarget) -> float:
        """Return the requests per second with PROBED requests in flight."""
        shape = scenario.ways[0].shape
        count = max(PROBED, round(4 * PROBED * self.options.scale))
        shot = self._shot(scenario, Way("capacity", shape, count, in_flight=PROBED), target, 0)
        rate = shot.requests / shot.seconds
        self._say(f"{target.about.name}: capacity {rate:.1f} requests/s of {shape}")
        return rate

    def _search(self, scenario: Scenario, target: HttpTarget, limit: float) -> tuple[Way, ...]:
        """Return the highest rate whose 99th percentile is at most `limit` ms, as a measured way.

        The rate is doubled from a quarter of the capacity, then the interval is halved.
        """
        rate, held, lost = self._capacity(scenario, target) / 4, 0.0, 0.0
        best: tuple[Way, Shot] | None = None
        for _ in range(2 * STEPS):
            seconds = max(SEARCH_SECONDS * self.options.scale, FEWEST_ARRIVALS / rate)
            way = poisson_at(round(rate, 2), seconds)
            shot = self._shot(scenario, way, target, 0)
            p99 = float(np.percentile(shot.latencies, 99))
            holds = p99 <= limit and not shot.refused
            said = "held" if holds else "not held"
            self._say(f"{target.about.name}: {way.name}: p99 {p99:.1f} ms, {said}")
            held, lost = (rate, lost) if holds else (held, rate)
            best = (way, shot) if holds else best
            if lost and lost < 1.1 * held:
                break
            rate = 2 * rate if not lost else (held + lost) / 2
        if best is None:
            raise ValueError(f"no rate down to {rate:.2f}/s has a p99 of at most {limit:g} ms")
        way = replace(best[0], name=f"highest with p99 <= {limit:g} ms: {best[0].rate:g}/s")
        self._figures[scenario.name, target.about.name, way.name] = WayFigures([best[1]], done=True)
        return (way,)


def _empty(scenario: Scenario, way: Way, target: HttpTarget) -> Row:
    """Return a row without figures."""
    notes, shape, total = [], str(way.shape), way.requests
    if way.in_flight > way.sent:
        notes.append(f"only {way.sent:,} in flight, because no more are sent")
    if scenario.asks:
        shape = f"{len(scenario.asks)} texts"
        total = sum(len(list(ask.chunks(way.chunk))) for ask in scenario.asks)
    return Row(
        *(scenario.name, way.name, shape, target.about.name),
        requests=max(1, min(total, way.sent)),
        of=total,
        notes=tuple(notes),
        asked=way.rate,
    )


def _is_part(scenario: Scenario, way: Way, asks: Sequence[BenchRequest]) -> bool:
    """Return whether these requests are only a part of one query's requests."""
    return not scenario.asks and way.chunk is not None and 1 < len(asks) < way.requests


def _api(way: Way, target: HttpTarget) -> Api:
    return APIS["completions" if way.decodes else target.about.api]
